"""Copies KV blocks between a GPU and pinned memory as engines do with PyTorch. Prints the times as JSON.

The only argument is JSON: blocks, layers, row_bytes (of a block in one layer), passes, device.
On the device, a block has one row for each layer, in separate places. On the host, it is contiguous.
"""

import sys

# `python -c` puts the current directory first, so its json.py or torch.py would be imported.
if sys.path and sys.path[0] == "":
    del sys.path[0]

import ctypes
import json
import signal
import time


def refuse(reason, is_missing=False):
    """`is_missing`: another Python may have PyTorch, or a PyTorch with a GPU."""
    print(json.dumps({"error": reason, "is_missing": is_missing}))
    sys.exit(0)


def main():
    # PR_SET_PDEATHSIG: Ctrl-C ends the command, but does not reach this process, which is in another group.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    request = json.loads(sys.argv[1])
    try:
        import torch
    except Exception as error:
        refuse(f"{sys.executable} cannot import torch: {error}", True)
    device = torch.device(request["device"])
    is_cuda = device.type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        refuse(f"PyTorch {torch.__version__} finds no GPU", True)

    blocks, layers, row = request["blocks"], request["layers"], request["row_bytes"]
    # Elements of 2 bytes, like bfloat16, if a row is a multiple of 2 bytes.
    dtype, columns = (torch.int16, row // 2) if row % 2 == 0 else (torch.uint8, row)
    cache = [torch.randint(0, 100, (blocks, columns), dtype=dtype, device=device) for _ in range(layers)]
    expected = [layer.cpu() for layer in cache]
    pinned = torch.zeros((blocks, layers, columns), dtype=dtype, pin_memory=is_cuda)
    contiguous = torch.zeros((blocks, layers, columns), dtype=dtype, device=device)
    # Blocks that are adjacent on one side are not adjacent on the other.
    order = list(range(blocks - 1, -1, -1))
    ids = torch.tensor(order, device=device)

    def synchronize():
        if is_cuda:
            torch.cuda.synchronize(device)

    def copies_to_host():
        for at, block in enumerate(order):
            for number, layer in enumerate(cache):
                pinned[at, number].copy_(layer[block], non_blocking=True)

    def copies_to_device():
        for at, block in enumerate(order):
            for number, layer in enumerate(cache):
                layer[block].copy_(pinned[at, number], non_blocking=True)

    def gather_to_host():
        staged = torch.stack([layer.index_select(0, ids) for layer in cache], dim=1)
        pinned.copy_(staged, non_blocking=True)

    def scatter_to_device():
        staged = pinned.to(device, non_blocking=True)
        for number, layer in enumerate(cache):
            layer.index_copy_(0, ids, staged[:, number])

    def one_copy_to_host():
        pinned.copy_(contiguous, non_blocking=True)

    def one_copy_to_device():
        contiguous.copy_(pinned, non_blocking=True)

    def timed(call):
        synchronize()
        begun = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - begun

    def is_right(to_host):
        if to_host:
            return all(torch.equal(pinned[:, n], expected[n][order]) for n in range(layers))
        return all(torch.equal(layer.cpu(), rows) for layer, rows in zip(cache, expected))

    rows = []
    ways = [
        ("PyTorch, copy_ of each row", copies_to_host, copies_to_device),
        ("PyTorch, index_select and index_copy_", gather_to_host, scatter_to_device),
    ]
    for name, out, back in ways:
        for to_host, call, limit in [(True, out, one_copy_to_host), (False, back, one_copy_to_device)]:
            if to_host:
                pinned.zero_()
            else:
                for layer in cache:
                    layer.zero_()
                for number in range(layers):
                    pinned[:, number] = expected[number][order]
            timed(call)
            if not is_right(to_host):
                refuse(f"PyTorch {torch.__version__}: {name} copied wrong bytes")
            times, limits = [], []
            for _ in range(request["passes"]):
                times.append(timed(call))
                limits.append(timed(limit))
            rows.append({"name": name, "to_host": to_host, "seconds": times, "limit_seconds": limits})
    print(json.dumps({"version": torch.__version__, "rows": rows}))


main()
