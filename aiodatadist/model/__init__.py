"""A small transformer with a paged KV cache, in numpy, for the demo and for serving without an accelerator.

    model = Model.load()
    kv = model.allocate_kv(num_blocks=64)            # or arrays of `model.kv_shapes(64)` owned elsewhere
    tokens = tokenizer.encode(draw_prompt(seed=1, length=400).text)
    logits = model.prefill(tokens, kv, block_table)  # after this the cache may travel to another process
    new = model.decode_greedy(int(logits.argmax()), len(tokens), kv, block_table, max_new_tokens=64)
    print(tokenizer.decode(new))

Nothing here imports the rest of aiodatadist.
"""

from . import tokenizer
from .digests import BlockDigest, block_digests, differing_blocks
from .prompts import Prompt, draw_prompt
from .transformer import TENSORS_PER_LAYER, BlockTable, KVCache, Model, ModelConfig, one_blas_thread

__all__ = [
    "TENSORS_PER_LAYER",
    "BlockDigest",
    "BlockTable",
    "KVCache",
    "Model",
    "ModelConfig",
    "Prompt",
    "block_digests",
    "differing_blocks",
    "draw_prompt",
    "one_blas_thread",
    "tokenizer",
]
