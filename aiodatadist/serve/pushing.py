"""Hand-over by push: the decode worker reserves first, the prefill worker pushes layer by layer.

Not built yet; both sides belong into this file.

* Decode side: ``POST /pd/reserve`` and its `Reservations` (states ``reserved``, ``receiving``, ``ready``, ``running``,
  and ``quarantined`` after an abort: such blocks come back by the writer's word, by ``dd.fence`` of the writer, or by a
  deadline that ends with unlinking it), and `DecodeJob` whose ticket says `pushed`. `decode.DecodePart` calls in where
  it now refuses. The cache is then registered with ``remote="rw"`` (`worker._open_units`).
* Prefill side: `PrefillJob.reservation`. The engine's `on_layer` records into a `LayerGate` of
  ``transfer_cache_async``; `prefill.PrefillPart` calls in where it now refuses. The link is made by the prefill worker.
* Router: `flows.PushFlow`.
"""
