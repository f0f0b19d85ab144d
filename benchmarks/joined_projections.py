"""Row counts at which a joined projection lacks the bits of its parts' own products, on this GPU.

For the groups of released shapes (q/k/v, gate/up), in bfloat16 and float16, by the probe that an
engine runs when it starts. Run: python benchmarks/joined_projections.py [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from looptrt.bench.results import machine, write_json
from looptrt.plugins.probe import Clock
from looptrt.plugins.probe_products import probe_products
from looptrt.plugins.products import JoinedProduct
from looptrt.runtime.padding import PACKED_SIZES, SIZES

GROUPS = {
    "Ouro-1.4B": (JoinedProduct(2048, (2048,) * 3), JoinedProduct(2048, (5632,) * 2)),
    "recurrent Llama-3.2-1B": (
        JoinedProduct(2048, (2048, 512, 512)),
        JoinedProduct(2048, (8192,) * 2),
    ),
    "recurrent OLMo-2-1B": (JoinedProduct(2048, (2048,) * 3), JoinedProduct(2048, (8192,) * 2)),
}
ROWS = sorted({*range(1, 33), *SIZES, *PACKED_SIZES})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="recorded where git cannot tell it")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    differ: dict[str, list[int]] = {}
    for model, products in GROUPS.items():
        for dtype in ("bfloat16", "float16"):
            for product in products:
                name = f"{model}, {' + '.join(map(str, product.sizes))}, {dtype}"
                differ[name] = [
                    rows
                    for rows in ROWS
                    if not probe_products([product], [rows], dtype, device, Clock(60.0))[0].holds
                ]
                print(f"{name}: {len(differ[name])} of {len(ROWS)} row counts differ", flush=True)
    if args.out:
        write_json({"machine": machine(args.commit), "rows": ROWS, "differ": differ}, args.out)
    return 1 if any(differ.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
