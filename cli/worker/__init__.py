"""`adapterctl worker`: a small continuous-batching worker, the reference for embedding the cache and the engine.

requests    what is asked, and what is answered
models      a model directory or the built-in tiny model, and text to tokens
attention   many sequences as the rows of one forward, each with keys and values of its own (`kv`)
prefix      whole blocks of keys and values, shared between requests whose outputs are equal
scheduling  who runs next
hold        one request's lease, and its pause
generation  one request's state; `roll` has all that are open, and tells their callers
flight      one forward: launched, and its tokens collected; `loop` puts one after the other
inbox       how others reach the loop; `streams` is for coroutines
lines       JSON lines in and out; `session` puts it all together; `command` is the command
"""
