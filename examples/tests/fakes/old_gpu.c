// A driver with one GPU that is too old, in as much of the driver's interface as it takes to say so.
#include <stddef.h>
#include <string.h>

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal == 0 ? 0 : 101; }
int cuDeviceGetName(char* name, int length, int device) { strncpy(name, "A GPU of 2016", length); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)8 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    // 16: multiprocessors; 75 and 76: compute capability.
    *value = attribute == 16 ? 20 : attribute == 75 ? 6 : attribute == 76 ? 1 : 0;
    return 0;
}
int cuGetErrorName(int code, const char** text) { *text = "CUDA_ERROR_OF_A_FAKE"; return 0; }
int cuGetErrorString(int code, const char** text) { *text = "a fake driver's error"; return 0; }
