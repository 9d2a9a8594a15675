"""Batches that a DataLoader hands over in a second, as torch has it and with tensorwire's leases, as JSON lines.

    python benches/data_loader.py [--workers 4] [--rounds 3]

The data costs nothing to make: what is measured is the way of small batches from worker processes to this one. Both
take turns, each time with workers of their own.
"""

import argparse
import json
import statistics
import time

import tensorwire.torch
import torch
from torch.utils.data import DataLoader, Dataset

BATCH = 8


class Ones(Dataset):
    def __len__(self):
        return 40_000

    def __getitem__(self, index):
        return torch.ones(64)


def batches_per_second(workers):
    loader = DataLoader(Ones(), batch_size=BATCH, num_workers=workers, persistent_workers=True)
    for _ in loader:
        pass
    begin = time.perf_counter()
    count = sum(1 for _ in loader)
    return count / (time.perf_counter() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seen = {"torch": [], "tensorwire": []}
    for _ in range(args.rounds):
        for library, rates in seen.items():
            if library == "tensorwire":
                tensorwire.torch.install_reductions()
            rates.append(batches_per_second(args.workers))
            tensorwire.torch.uninstall_reductions()
    ratio = statistics.median(seen["tensorwire"]) / statistics.median(seen["torch"])
    for library, rates in seen.items():
        row = {"op": "data loader", "library": library, "workers": args.workers, "batch_bytes": BATCH * 256}
        row |= {"batches_per_s": round(statistics.median(rates)), "all": [round(rate) for rate in rates]}
        row |= {"torch": torch.__version__}
        print(json.dumps(row | ({"ratio": round(ratio, 2)} if library == "tensorwire" else {})), flush=True)


if __name__ == "__main__":
    main()
