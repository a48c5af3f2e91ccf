#!/usr/bin/env python3
"""What PyTorch takes for the gathers of `bench --gather`, on the same shapes.

    mpirun -n 2 python3 examples/bench/peer.py [--json FILE] [--repeats 25]

One rank per GPU; rank and world come from mpirun's or torchrun's variables. Measures
all_gather_into_tensor (one call per weight, all calls of a unit coalesced) on bytes and on BF16, and
the unshard of FSDP2's fully_shard in BF16 and, where torchao is installed, in float8. Medians on the
device's clock; the slowest rank counts.
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
SHAPES = {
    "q, k, v": [BLOCK[:3]],
    "one projection": [BLOCK[4:5]],
    "one block": [BLOCK],
    "two blocks as a unit": [BLOCK + BLOCK],
    "four blocks": [BLOCK] * 4,
}
WARM_UP = 3


def start():
    for ours, theirs in [("RANK", "RANK"), ("WORLD_SIZE", "SIZE"), ("LOCAL_RANK", "LOCAL_RANK")]:
        if ours not in os.environ:
            os.environ[ours] = os.environ.get(f"OMPI_COMM_WORLD_{theirs}", "1" if theirs == "SIZE" else "0")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def measure(device, repeats, work, between=lambda: None):
    """Milliseconds on the device and microseconds of the host, medians, the slowest rank's."""
    ahead = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    word = torch.zeros(1, device=device)
    device_ms, host_us = [], []
    for repeat in range(WARM_UP + repeats):
        between()
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.all_reduce(word)
        ahead.zero_()
        first.record()
        begun = time.perf_counter()
        work()
        host = time.perf_counter() - begun
        last.record()
        last.synchronize()
        if repeat >= WARM_UP:
            device_ms.append(first.elapsed_time(last))
            host_us.append(host * 1e6)
    both = torch.tensor([statistics.median(device_ms), statistics.median(host_us)], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both.tolist()


def raw(device, units, dtype, repeats):
    world = dist.get_world_size()
    buffers = []
    for unit in units:
        parts = []
        for rows, columns in unit:
            shard = -(-rows // world) * columns
            parts.append((torch.zeros(shard, dtype=dtype, device=device),
                          torch.zeros(shard * world, dtype=dtype, device=device)))
        buffers.append(parts)

    def work():
        for parts in buffers:
            with dist._coalescing_manager(device=device):
                for shard, whole in parts:
                    dist.all_gather_into_tensor(whole, shard)

    return measure(device, repeats, work)


class Block(nn.Module):
    """Linear layers that are gathered together; FSDP2 refuses a ModuleList."""

    def __init__(self, unit, device):
        super().__init__()
        options = {"bias": False, "dtype": torch.bfloat16, "device": device}
        self.layers = nn.ModuleList(nn.Linear(columns, rows, **options) for rows, columns in unit)

    def forward(self, inputs):
        return [layer(inputs) for layer in self.layers]


def fsdp(device, units, repeats, float8):
    blocks = nn.ModuleList(Block(unit, device) for unit in units)
    if float8:
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        convert_to_float8_training(blocks, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    for block in blocks:
        fully_shard(block)

    def work():
        for block in blocks:
            block.unshard()

    def between():
        for block in blocks:
            block.reshard()
        if float8:
            # As after an optimizer step: the scales are known, the bytes are cast when gathered.
            precompute_float8_dynamic_scale_for_fsdp(blocks)

    return measure(device, repeats, work, between)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=25)
    arguments = parser.parse_args()
    device = start()
    first = dist.get_rank() == 0
    try:
        import torchao
        torchao_version = torchao.__version__
    except ImportError:
        torchao_version = None
    version = ".".join(map(str, torch.cuda.nccl.version()))
    machine = {
        "gpu": torch.cuda.get_device_name(device), "ranks": dist.get_world_size(), "torch": torch.__version__,
        "torchao": torchao_version, "nccl": version, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if first:
        print(json.dumps(machine))
        if torchao_version is None:
            print("torchao is not installed: FSDP2 in float8 is not measured")
    rows = []
    for shape, units in SHAPES.items():
        kinds = [
            ("all_gather_into_tensor, bytes", lambda: raw(device, units, torch.uint8, arguments.repeats)),
            ("all_gather_into_tensor, bf16", lambda: raw(device, units, torch.bfloat16, arguments.repeats)),
            ("FSDP2 unshard, bf16", lambda: fsdp(device, units, arguments.repeats, False)),
        ]
        if torchao_version is not None:
            kinds.append(("FSDP2 + torchao unshard, float8", lambda: fsdp(device, units, arguments.repeats, True)))
        for kind, run in kinds:
            try:
                milliseconds, host = run()
            except Exception as error:  # A peer that fails is a result, too.
                if first:
                    print(f"{shape:21} {kind:32} failed: {type(error).__name__}: {error}")
                continue
            torch.cuda.empty_cache()
            rows.append({"shape": shape, "kind": kind, "ms": milliseconds, "host_us": host})
            if first:
                print(f"{shape:21} {kind:32} {milliseconds:9.4f} ms, host {host:9.1f} us", flush=True)
    if first and arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
