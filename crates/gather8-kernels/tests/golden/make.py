#!/usr/bin/env python3
"""Makes the golden files beside it. Needs numpy, ml_dtypes and torch (CPU); takes two minutes.

    python make.py

casts.txt    one line per input for every midpoint between neighbouring codes, one ulp around it,
             and special values: f32 bits, E4M3 code, E5M2 code
codes.txt    the f32 bits of all 256 codes of both formats
digests.txt  CRC-32 of the codes of all 65,536 bf16 and f16 inputs, times a few scales, and of all
             2^32 f32 inputs in blocks of 2^24
adamw.bin    the weights after 100 steps of torch.optim.AdamW in f32 (little endian), 512 elements
             per case, cases in the order of CASES
versions.txt what made them

Before the conversion values are clamped to the format's largest, infinities too; NaN codes are
written as 0x7f.
"""
import pathlib
import zlib

import ml_dtypes
import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
FORMATS = [("e4m3", ml_dtypes.float8_e4m3fn, 448.0), ("e5m2", ml_dtypes.float8_e5m2, 57344.0)]
SCALES = [1.0, 0.37, 1234.5, 2.0**-9, 3.0e38]
np.seterr(all="ignore")


def codes(x, dtype, largest):
    assert x.dtype == np.float32
    nan = np.isnan(x)
    out = np.clip(x, np.float32(-largest), np.float32(largest)).astype(dtype).view(np.uint8)
    out[nan] = 0x7F
    return out


def casts():
    inputs = {0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000,
              0x7F800001, 0x7FFFFFFF}
    for _, dtype, largest in FORMATS:
        values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
        values = np.unique(values[np.isfinite(values) & (values >= 0)])
        beyond = 2 * values[-1] - values[-2]
        for a, b in zip(values, list(values[1:]) + [beyond]):
            middle = np.float32((a + b) / 2)
            assert float(middle) == (a + b) / 2
            bits = int(middle.view(np.uint32))
            inputs |= {bits - 1, bits, bits + 1, int(np.float32(a).view(np.uint32))}
    inputs = np.array(sorted(inputs), dtype=np.uint32)
    inputs = np.concatenate([inputs, inputs | np.uint32(0x80000000)])
    both = [codes(inputs.view(np.float32), dtype, largest) for _, dtype, largest in FORMATS]
    lines = [f"{x:08x} {a:02x} {b:02x}" for x, a, b in zip(inputs, *both)]
    (HERE / "casts.txt").write_text("\n".join(lines) + "\n")


def decoded():
    lines = []
    for name, dtype, _ in FORMATS:
        values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        bits = values.view(np.uint32).copy()
        bits[np.isnan(values)] = 0x7FC00000
        lines += [f"{name} {code:02x} {x:08x}" for code, x in enumerate(bits)]
    (HERE / "codes.txt").write_text("\n".join(lines) + "\n")


def digests():
    lines = []
    all16 = np.arange(65536, dtype=np.uint16)
    sources = [("bf16", (all16.astype(np.uint32) << 16).view(np.float32)),
               ("f16", all16.view(np.float16).astype(np.float32))]
    for name, dtype, largest in FORMATS:
        for source, values in sources:
            for scale in SCALES:
                out = codes(values * np.float32(scale), dtype, largest)
                bits = np.float32(scale).view(np.uint32)
                lines.append(f"{name} {source} {bits:08x} {zlib.crc32(out.tobytes()):08x}")
        for block in range(256):
            x = np.arange(1 << 24, dtype=np.uint32) + np.uint32(block << 24)
            out = codes(x.view(np.float32), dtype, largest)
            lines.append(f"{name} f32 {block:02x} {zlib.crc32(out.tobytes()):08x}")
    (HERE / "digests.txt").write_text("\n".join(lines) + "\n")


ELEMENTS, STEPS = 512, 100
CASES = [(weight_decay, lr, b2, bf16) for weight_decay in (0.01, 0.0) for lr in (1e-3, 1e-2)
         for b2 in (0.95, 0.999) for bf16 in (False, True)]
EPS, B1 = 1e-8, 0.9


def mix(x):
    """splitmix64's finaliser: the same numbers in numpy and in Rust."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(step):
    """Multiples of 2^-23 in [-1, 1), exact in f32: one per element, for one step."""
    index = np.arange(ELEMENTS, dtype=np.uint64) + np.uint64(step * ELEMENTS)
    return ((mix(index) >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1).astype(np.float32)


def gradient(step, bf16):
    """Noise around a mean that differs from element to element, times 2^-7."""
    mean = uniform(1000)
    g = (uniform(step) + mean * np.float32(0.5)).astype(np.float32) * np.float32(2.0**-7)
    return g.astype(ml_dtypes.bfloat16).astype(np.float32) if bf16 else g


def adamw():
    finals = []
    for weight_decay, lr, b2, bf16 in CASES:
        p = torch.nn.Parameter(torch.from_numpy(uniform(0).copy()))
        optimizer = torch.optim.AdamW([p], lr=lr, betas=(B1, b2), eps=EPS,
                                      weight_decay=weight_decay, foreach=False, fused=False)
        for step in range(1, STEPS + 1):
            p.grad = torch.from_numpy(gradient(step, bf16).copy())
            optimizer.step()
        finals.append(p.detach().numpy().astype("<f4"))
    (HERE / "adamw.bin").write_bytes(np.concatenate(finals).tobytes())


if __name__ == "__main__":
    casts()
    decoded()
    adamw()
    digests()
    (HERE / "versions.txt").write_text(
        f"numpy {np.__version__}\nml_dtypes {ml_dtypes.__version__}\ntorch {torch.__version__}\n")
