#!/usr/bin/env python3
"""Other ways to gather a unit's bytes with NCCL, next to the group of one all-gather per weight.

    mpirun -n 2 python3 examples/bench/variants.py [--json FILE] [--repeats 25] [--divide 1]

One rank per GPU. Calls NCCL (2.28 or newer) directly, so that nothing but NCCL is compared: one flat
gather of all bytes; buffers that are registered (ncclCommRegister); symmetric windows in memory of
ncclMemAlloc (ncclCommWindowRegister); the same on a communicator whose CTA policy is zero, which lets
copy engines move the bytes. A flat gather leaves every rank's shards together: laying the weights out
from there would cost a copy that is not in its time. Medians on the device's clock, variants in turn in
every round; the slowest rank counts.
"""
import argparse
import ctypes
import glob
import json
import os
import statistics
import sys
import time

import torch
from torch.distributed import TCPStore

BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
SHAPES = {
    "q, k, v": BLOCK[:3],
    "one projection": BLOCK[4:5],
    "one block": BLOCK,
    "two blocks as a unit": BLOCK + BLOCK,
    "400M and six of 64 KiB": [(16, 4096)] * 3 + [(97664, 4096)] + [(16, 4096)] * 3,
    "256 of 32 KiB": [(8, 4096)] * 256,
}
WARM_UP = 3
ALIGNMENT = 256
UINT8, SYMMETRIC, CTA_POLICY_ZERO, UNDEFINED = 1, 1, 2, -(2**31)


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t as of 2.28; the size and the version in it tell later libraries."""

    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint)]
    _fields_ += [(name, ctypes.c_int) for name in ("blocking", "cga", "min_ctas", "max_ctas")]
    _fields_ += [("net", ctypes.c_char_p), ("split_share", ctypes.c_int), ("traffic", ctypes.c_int)]
    _fields_ += [("name", ctypes.c_char_p), ("collnet", ctypes.c_int), ("cta_policy", ctypes.c_int)]
    _fields_ += [(name, ctypes.c_int) for name in ("shrink_share", "nvls_ctas", "net_channels", "nvlink_centric")]


class Failed(Exception):
    pass


class Nccl:
    def __init__(self):
        beside_torch = os.path.join(os.path.dirname(torch.__file__), "..", "nvidia", "nccl", "lib", "libnccl.so.2")
        names = [os.environ.get("GATHER8_NCCL"), *glob.glob(beside_torch), "libnccl.so.2"]
        self.library = ctypes.CDLL(next(name for name in names if name))
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise Failed(f"{name}: {self.library.ncclGetErrorString(code).decode()} ({code})")

    def communicator(self, store, key, rank, world, cta_policy=UNDEFINED):
        unique = UniqueId()
        if rank == 0:
            self.call("ncclGetUniqueId", ctypes.byref(unique))
            store.set(key, bytes(unique))
        ctypes.memmove(ctypes.byref(unique), store.get(key), 128)
        config = Config(**{name: UNDEFINED for name, kind in Config._fields_ if kind is ctypes.c_int})
        config.size, config.magic, config.version = ctypes.sizeof(Config), 0xCAFEBEEF, 22800
        config.blocking, config.cta_policy = 1, cta_policy
        comm = ctypes.c_void_p()
        self.call("ncclCommInitRankConfig", ctypes.byref(comm), world, unique, rank, ctypes.byref(config))
        return comm


class Way:
    """A way to gather: a communicator, two buffers, and whether all goes in one call."""

    def __init__(self, comm, sent, received, flat):
        self.comm, self.sent, self.received, self.flat = comm, sent, received, flat


class Rank:
    def __init__(self, arguments):
        variables = os.environ
        self.rank = int(variables.get("OMPI_COMM_WORLD_RANK", variables.get("RANK", "0")))
        self.world = int(variables.get("OMPI_COMM_WORLD_SIZE", variables.get("WORLD_SIZE", "1")))
        torch.cuda.set_device(int(variables.get("OMPI_COMM_WORLD_LOCAL_RANK", variables.get("LOCAL_RANK", "0"))))
        torch.zeros(1, device="cuda")
        port = int(variables.get("MASTER_PORT", "29566"))
        self.store = TCPStore("127.0.0.1", port, self.world, self.rank == 0)
        self.nccl, self.arguments, self.meetings = Nccl(), arguments, 0
        self.stream = torch.cuda.Stream()
        self.keep = []
        make = self.nccl.communicator
        self.plain = make(self.store, "plain", self.rank, self.world)
        self.comms = {
            "": self.plain,
            "registered": make(self.store, "registered", self.rank, self.world),
            "windows": make(self.store, "windows", self.rank, self.world),
            "copy engines": make(self.store, "copy engines", self.rank, self.world, CTA_POLICY_ZERO),
        }
        self.word = torch.zeros(self.world, dtype=torch.uint8, device="cuda")

    def exchange(self, value):
        """Every rank's value."""
        self.meetings += 1
        self.store.set(f"{self.meetings}.{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{self.meetings}.{rank}")) for rank in range(self.world)]

    def memory(self, kind, size):
        if kind in ("windows", "copy engines"):
            pointer = ctypes.c_void_p()
            self.nccl.call("ncclMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(size))
            return pointer.value
        self.keep.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        return self.keep[-1].data_ptr()

    def buffers(self, kind, size):
        comm, handles = self.comms[kind], []
        sent, received = self.memory(kind, size), self.memory(kind, size * self.world)
        for address, bytes_ in ((sent, size), (received, size * self.world)):
            handle = ctypes.c_void_p()
            where = (comm, ctypes.c_void_p(address), ctypes.c_size_t(bytes_), ctypes.byref(handle))
            if kind == "registered":
                self.nccl.call("ncclCommRegister", *where)
            elif kind:
                self.nccl.call("ncclCommWindowRegister", *where, SYMMETRIC)
            handles.append((address, handle))
        return sent, received, handles

    def release(self, kind, handles):
        torch.cuda.synchronize()
        for address, handle in handles:
            if kind == "registered":
                self.nccl.call("ncclCommDeregister", self.comms[kind], handle)
            elif kind:
                self.nccl.call("ncclCommWindowDeregister", self.comms[kind], handle)
                self.nccl.call("ncclMemFree", ctypes.c_void_p(address))
        self.keep.clear()
        torch.cuda.empty_cache()

    def gather(self, way, shards):
        stream = ctypes.c_void_p(self.stream.cuda_stream)

        def one(sent, received, size):
            self.nccl.call(
                "ncclAllGather", ctypes.c_void_p(sent), ctypes.c_void_p(received), ctypes.c_size_t(size), UINT8,
                way.comm, stream,
            )

        if way.flat:
            return one(way.sent, way.received, sum(shards))
        self.nccl.call("ncclGroupStart")
        at = 0
        for size in shards:
            one(way.sent + at, way.received + at * self.world, size)
            at += size
        self.nccl.call("ncclGroupEnd")

    def view(self, address, size):
        holder = type("Memory", (), {})()
        holder.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }
        return torch.as_tensor(holder, device="cuda")

    def right(self, way, shards):
        """Gathers bytes that tell rank and place, and looks at every one of them."""
        total = sum(shards)
        numbers = torch.arange(total, device="cuda") % 251

        def of(rank):
            return ((numbers + rank * 13) % 256).to(torch.uint8)

        self.view(way.sent, total).copy_(of(self.rank))
        self.view(way.received, total * self.world).zero_()
        torch.cuda.synchronize()
        self.exchange("filled")
        self.gather(way, shards)
        torch.cuda.synchronize()
        received, ranks = self.view(way.received, total * self.world), [of(rank) for rank in range(self.world)]
        if way.flat:
            return torch.equal(received, torch.cat(ranks))
        at, expected = 0, []
        for size in shards:
            expected += [rank[at : at + size] for rank in ranks]
            at += size
        return torch.equal(received, torch.cat(expected))

    def time(self, way, shards):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The ranks meet on the device, which is then held back until the host has issued all.
        word = self.word.data_ptr()
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        self.nccl.call(
            "ncclAllGather", ctypes.c_void_p(word + self.rank), ctypes.c_void_p(word), ctypes.c_size_t(1), UINT8,
            self.plain, stream,
        )
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(2_000_000)
            first.record()
            begun = time.perf_counter()
            self.gather(way, shards)
            host = time.perf_counter() - begun
            last.record()
        last.synchronize()
        return first.elapsed_time(last), host * 1e6


def measure(rank, name, weights):
    shards = [-(-rows // rank.world) * (columns // rank.arguments.divide) for rows, columns in weights]
    shards = [-(-size // ALIGNMENT) * ALIGNMENT for size in shards]
    ways, rows, handles = {}, [], []
    for kind in rank.comms:
        problem = None
        try:
            sent, received, held = rank.buffers(kind, sum(shards))
            handles.append((kind, held))
            for flat in (False, True):
                label = ("flat" if flat else "grouped") + (f", {kind}" if kind else "")
                way = Way(rank.comms[kind], sent, received, flat)
                if not rank.right(way, shards):
                    raise Failed(f"{label}: other bytes than were sent")
                ways[label] = way
        except Failed as error:
            problem = str(error)
        problems = [problem for problem in rank.exchange(problem) if problem]
        if problems:
            rows.append({"shape": name, "way": kind, "problem": problems[0]})
            ways = {label: way for label, way in ways.items() if way.comm is not rank.comms[kind]}
    times = {label: [] for label in ways}
    for repeat in range(WARM_UP + rank.arguments.repeats):
        for label, way in ways.items():
            took = rank.time(way, shards)
            if repeat >= WARM_UP:
                times[label].append(took)
    for label, taken in times.items():
        own = [statistics.median(values) for values in zip(*taken)]
        slowest = [max(values) for values in zip(*rank.exchange(own))]
        rows.append({"shape": name, "way": label, "ms": slowest[0], "host_us": slowest[1]})
    grouped = next(row["ms"] for row in rows if row["way"] == "grouped")
    for row in rows:
        if "ms" in row:
            row["ratio"] = row["ms"] / grouped
        if rank.rank == 0:
            text = "{ms:9.4f} ms {ratio:7.3f} x, host {host_us:7.1f} us" if "ms" in row else "{problem}"
            print(f"{row['shape']:23} {row['way']:22} " + text.format(**row), flush=True)
    for kind, held in handles:
        rank.release(kind, held)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--divide", type=int, default=1)
    arguments = parser.parse_args()
    rank = Rank(arguments)
    if rank.nccl.version < 22800:
        sys.exit(f"variants: NCCL {rank.nccl.version} is loaded, 2.28 (22800) or newer is needed")
    machine = {
        "gpu": torch.cuda.get_device_name(), "ranks": rank.world, "nccl": rank.nccl.version,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if rank.rank == 0:
        print(json.dumps(machine))
    rows = [row for name, weights in SHAPES.items() for row in measure(rank, name, weights)]
    if rank.rank == 0 and arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)
    rank.exchange("done")
    if rank.rank == 0:
        time.sleep(1)  # The store is here, and the others may still ask it.


if __name__ == "__main__":
    main()
