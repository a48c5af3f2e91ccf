"""Has torch read what `export` writes: `python export_torch.py PATH_OF_EXPORT`.

Wants torch and safetensors. Makes a file of matrices and other tensors, exports it in both formats at
several numbers of ranks, and compares every code and scale with torch's own arithmetic.
"""

import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

RANKS = [1, 2, 3, 5, 8]
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
METADATA = {"format": "pt", "a \"quoted\" key": "with a\nline end", "made": "by torch"}


def tensors():
    torch.manual_seed(8)
    wide = torch.randn(301, 77) * torch.logspace(-6, 2, 77)
    return {
        "layer.0.weight": torch.randn(64, 48),
        "layer.1.weight": (torch.randn(7, 130) * 0.02).to(torch.bfloat16),
        "layer.2.weight": (torch.randn(33, 5) * 3).to(torch.float16),
        "layer.3.weight": wide,
        "tiny": torch.full((2, 3), 1e-30),
        "subnormal halves": torch.tensor([[6e-8, -6e-8, 0.0, -0.0]], dtype=torch.float16),
        "zeros": torch.zeros(4, 4),
        "one": torch.tensor([[-2.5]]),
        "column": torch.randn(9, 1).to(torch.bfloat16),
        "empty": torch.zeros(0, 5),
        "layer.0.bias": torch.randn(64),
        "kernel": torch.randn(2, 3, 4),
        "scalar": torch.tensor(3.5),
        "double": torch.randn(3, 3, dtype=torch.float64),
        "ids": torch.arange(12).reshape(3, 4),
        "mask": torch.tensor([[True, False]]),
        "float8 already": torch.randn(4, 4).to(torch.float8_e4m3fn),
    }


def quantised(tensor, dtype):
    largest = torch.finfo(dtype).max
    amax = max(tensor.float().abs().max().double().item(), 1e-12)
    scale = torch.tensor(largest / amax, dtype=torch.float64).to(torch.float32)
    scaled = (tensor.float() * scale).clamp(-largest, largest)
    return scaled.to(dtype), torch.tensor(1.0) / scale


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.reshape(-1).view(torch.uint8).equal(
        b.reshape(-1).view(torch.uint8)
    )


def main():
    program = pathlib.Path(sys.argv[1])
    inputs = tensors()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        source = folder / "in.safetensors"
        save_file(inputs, source, metadata=METADATA)
        for name, dtype in FORMATS.items():
            files = set()
            for ranks in RANKS:
                target = folder / f"out-{name}-{ranks}.safetensors"
                command = [program, source, target, "--ranks", str(ranks), "--format", name]
                subprocess.run(command + ["--scaling", "dynamic"], check=True)
                files.add(target.read_bytes())
            assert len(files) == 1, f"{name}: the number of ranks changes the file"
            outputs = load_file(target)
            with safe_open(target, "pt") as file:
                assert file.metadata() == METADATA, file.metadata()
            converted = 0
            for key, tensor in inputs.items():
                floating = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
                if tensor.dim() == 2 and floating and tensor.numel() > 0:
                    codes, scale = quantised(tensor, dtype)
                    assert same_bits(outputs.pop(key), codes), (name, key)
                    assert same_bits(outputs.pop(key + "_scale"), scale), (name, key)
                    decoded = codes.float() * scale
                    step = torch.finfo(dtype).eps / 2
                    error = (decoded - tensor.float()).abs()
                    bound = tensor.float().abs() * step + torch.finfo(dtype).tiny * scale
                    assert (error <= bound).all(), (name, key)
                    converted += 1
                else:
                    assert same_bits(outputs.pop(key), tensor), (name, key)
            assert not outputs, sorted(outputs)
            print(f"{name}: {converted} matrices at ranks {RANKS}: one file, as torch computes it")


main()
