"""Compute a checkpoint's logits with transformers and tokenize strings. Runs in an engine's own Python.

``python logits_of_transformers.py CHECKPOINT OUT.json TEXT...``
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    checkpoint, out, *texts = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    results = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            logits_TV = model(torch.tensor([ids])).logits[0]
        results.append({"ids": ids, "text": tokenizer.decode(ids), "logits": logits_TV.tolist()})
    kind = type(model).__name__
    Path(out).write_text(json.dumps({"model": kind, "texts": results}))
