"""The other process of the example: an agent of NIXL that does not use Terrane.

It registers memory for a few blocks, sends its metadata, and waits until a block has been written
to this memory. Then it writes the block to memory of the process that started it.
"""

import json
import sys
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config

BLOCK = int(sys.argv[1])
BLOCKS = int(sys.argv[2])
# The seconds that each transfer may take. Without a limit, this process could poll without end.
LIMIT = 60

agent = nixl_agent("python-engine", nixl_agent_config(backends=["UCX"]))
memory = numpy.zeros(BLOCKS * BLOCK, dtype=numpy.uint8)
address = memory.ctypes.data
agent.register_memory([(address, memory.nbytes, 0, "")], "DRAM")


def send(message):
    print(json.dumps(message), flush=True)


# NIXL also prints to standard output, so each message is a line that begins with `{`.
send({"metadata": agent.get_agent_metadata().hex(), "address": address})
message = json.loads(sys.stdin.readline())
for piece in message["metadata"]:
    name = agent.add_remote_agent(bytes.fromhex(piece)).decode()

deadline = time.monotonic() + LIMIT
arrived = None
while arrived is None:
    if time.monotonic() > deadline:
        sys.exit(f"no block has arrived within {LIMIT} s; read the errors of the other process")
    for notification in agent.get_new_notifs().get(name, []):
        arrived = int(notification)

here = agent.get_xfer_descs([(address + arrived * BLOCK, BLOCK, 0)], "DRAM")
there = agent.get_xfer_descs([(message["address"] + message["block"] * BLOCK, BLOCK, 0)], "DRAM")
request = agent.initialize_xfer("WRITE", here, there, name, b"written")
deadline = time.monotonic() + LIMIT
state = agent.transfer(request)
while state == "PROC" and time.monotonic() < deadline:
    state = agent.check_xfer_state(request)
if state != "DONE":
    sys.exit(f"the write of a block has the state {state} after at most {LIMIT} s, not DONE")
agent.release_xfer_handle(request)

# The memory must stay registered until the other process closes the connection.
sys.stdin.read()
