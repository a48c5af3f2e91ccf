// An NCCL from before communicators could be split.
int ncclGetVersion(int* version) { *version = 21602; return 0; }
int ncclGetUniqueId(void* id) { return 3; }
int ncclCommInitRankConfig(void** comm, int ranks, ...) { return 3; }
int ncclCommGetAsyncError(void* comm, int* state) { return 3; }
int ncclCommAbort(void* comm) { return 3; }
int ncclCommDestroy(void* comm) { return 3; }
const char* ncclGetErrorString(int code) { return "a fake"; }
const char* ncclGetLastError(void* comm) { return ""; }
int ncclGroupStart(void) { return 3; }
int ncclGroupEnd(void) { return 3; }
int ncclAllGather(void) { return 3; }
int ncclAllReduce(void) { return 3; }
int ncclReduceScatter(void) { return 3; }
int ncclBroadcast(void) { return 3; }
