"""Disaggregated serving: an OpenAI-compatible router, prefill and decode workers, and an engine interface.

Needs `pip install 'aiodatadist[serve]'`. ``aiodatadist serve pd`` starts a cluster on this machine. Everything here
stands on the public API of the library, and the router knows nothing of KV.

One request in mode ``pull``: the router (`router`, `dispatch`, `flows`) has a prefill worker (`worker`, `prefill`)
compute the prompt and hold it under a ticket (`tickets`: a lease of the library); a decode worker (`decode`) reserves
blocks, adopts the lease, pulls (`fetching`), releases, and streams the answer (`text`, `openai`, `responding`) through
the router to the client. A client that goes, an abort or a timeout cancels the handlers all the way, and each gives
back what it holds in its own ``finally``.

=================  =========================================================================================
module             concern
=================  =========================================================================================
`engine`           what a model is to serving; the seam for other engines
`numpy_engine`     the built-in one; `paged` has its blocks, `sampling` chooses its tokens
`protocol`         messages between router and workers; `errors` the codes of what goes wrong
`units`            the engines behind one worker, each with its cache
`worker`           a worker process; `heartbeat` its registration; `prefill`, `decode`, `mixed` its handlers
`tickets`          prompts that are held for others; `fetching` how they are taken over; `pushing` the other way
`transfer_errors`  what the library says of a transfer, as codes
`running`          requests under way, duplicates, aborts
`background`       what runs beside requests, and never ends unseen
`damage`           digests of blocks, and damage done to them in tests
`responding`       how answers leave a worker; `text` from tokens to text; `openai` the shapes
`router`           the router process; `registry` its workers, `policies` who gets what, `health` who may
`dispatch`         attempts and retries; `flows` the orders of hand-over; `legs` the calls to workers
`probing`          whether workers are who and where they say; `prefix_tree` who has had which prompts
`admission`        how much a router takes
`results`          answers by pieces that carry their position; `migrating` streams that survive their decode worker
`redis_scheduler`  routers that share their work by Redis: the client's side; `redis_runs` the working side,
                   `redis_store` names, messages and scripts
`metrics`          what is counted
`http`, `config`   what every server does; settings
=================  =========================================================================================
"""
