"""One protocol for streams inside a machine: buffers shared with every receiver, announced over a Unix socket.

`shared_memory` and `cuda_ipc` are this protocol over two kinds of memory (`memory.SenderMemory`, `ReceiverMemory`).
"""
