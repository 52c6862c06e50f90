"""The other process of the example: an agent of NIXL that does not use Terrane.

It registers memory for a few blocks, sends its metadata, and waits until a block has been written
to this memory. Then it writes the block to memory of the process that started it.
"""

import json
import sys

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config

BLOCK = int(sys.argv[1])
BLOCKS = int(sys.argv[2])

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

arrived = None
while arrived is None:
    for notification in agent.get_new_notifs().get(name, []):
        arrived = int(notification)

here = agent.get_xfer_descs([(address + arrived * BLOCK, BLOCK, 0)], "DRAM")
there = agent.get_xfer_descs([(message["address"] + message["block"] * BLOCK, BLOCK, 0)], "DRAM")
request = agent.initialize_xfer("WRITE", here, there, name, b"written")
state = agent.transfer(request)
while state == "PROC":
    state = agent.check_xfer_state(request)
agent.release_xfer_handle(request)

# The memory must stay registered until the other process closes the connection.
sys.stdin.read()
