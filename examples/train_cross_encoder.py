"""Fine-tune all-MiniLM-L6-v2 as a cross-encoder (a reranker) on the STS benchmark, and explain a pair with it.

    python examples/train_cross_encoder.py --data FOLDER_WITH_STSBENCHMARK --out FOLDER [--steps 20]

One epoch, binary cross-entropy between the logit and the STS score: a few minutes on two cores. What is saved is a
model like any other: `CrossEncoder(FOLDER)`, `Explainer(FOLDER)`. `--steps` is for a short run; it says that it works
and no more.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from scipy.stats import spearmanr
from sentence_transformers import CrossEncoder
from transformers import get_linear_schedule_with_warmup

from rag_explain import Explainer
from rag_explain.encoder.loading import packaged_path

PAIR = "my laptop is slow", "Your notebook has become sluggish and takes long to start."
BATCH, RATE = 32, 5e-5
Pairs = list[tuple[str, str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds sts-train.csv and sts-dev.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder to save the model in")
    parser.add_argument("--model", default=str(packaged_path() or "sentence-transformers/all-MiniLM-L6-v2"))
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--dev", type=int, default=0, help="dev pairs to correlate scores on; 0: all")
    options = parser.parse_args()

    train, dev = read(options.data / "sts-train.csv"), read(options.data / "sts-dev.csv")[: options.dev or None]
    model = CrossEncoder(options.model, num_labels=1, max_length=128, device="cpu")
    fit(model, train, options.steps)
    print(
        f"Spearman on {len(dev[: options.dev or None])} dev pairs: {correlation(model, dev[: options.dev or None]):.3f}"
    )
    model.save_pretrained(str(options.out))
    print(Explainer(options.out).explain(*PAIR))


def fit(model: CrossEncoder, pairs: Pairs, batches: int | None) -> None:
    """One epoch of AdamW; the rate rises for a tenth of the steps and falls to zero from there."""
    torch.manual_seed(0)
    loader = [[pairs[index] for index in part] for part in torch.randperm(len(pairs)).split(BATCH)][:batches]
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimiser, len(loader) // 10, len(loader))
    model.train()
    for batch in loader:
        logits = model(model.preprocess([(left, right) for left, right, _ in batch]))["scores"][:, 0]
        wanted = torch.tensor([score for *_, score in batch])
        torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    model.eval()


def correlation(model: CrossEncoder, pairs: Pairs) -> float:
    left, right, scores = zip(*pairs, strict=True)
    return float(spearmanr(model.predict(list(zip(left, right, strict=True))), scores)[0])


def read(path: Path) -> Pairs:
    """Pairs of sentences with their score between 0 and 1."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row[5], row[6], float(row[4]) / 5) for row in rows]


if __name__ == "__main__":
    main()
