"""A NIXL agent that does not use Terrane, led over its standard input.

Usage: peer.py NAME BYTES. It registers so many bytes of host memory. Each line of input is a command
and its arguments; each answer is a line that begins with `@`. Bytes are in hexadecimal.
"""

import itertools
import sys
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config


class Peer:
    def __init__(self, name, size):
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.memory, self.registered = self.register(int(size))
        self.more = []

    def register(self, size):
        memory = numpy.zeros(size, dtype=numpy.uint8)
        descriptors = [(memory.ctypes.data, memory.nbytes, 0, "")]
        return memory, self.agent.register_memory(descriptors, "DRAM")

    def address(self):
        """The address of the memory."""
        return str(self.memory.ctypes.data)

    def metadata(self):
        """All metadata of the agent."""
        return self.agent.get_agent_metadata().hex()

    def partial(self):
        """The metadata of the first memory."""
        return self.agent.get_partial_agent_metadata(self.registered, inc_conn_info=True).hex()

    def register_more(self, size):
        self.more.append(self.register(int(size)))
        return "registered"

    def fill(self, data):
        self.memory[:] = numpy.frombuffer(bytes.fromhex(data), dtype=numpy.uint8)
        return "filled"

    def bytes(self):
        """The bytes of the memory."""
        return self.memory.tobytes().hex()

    def add(self, metadata):
        """Loads metadata of another agent, and answers with its name."""
        return self.agent.add_remote_agent(bytes.fromhex(metadata)).decode()

    def move(self, operation, offset, address, length, agent, message):
        """Writes to or reads from the memory of another agent, which a message notifies of the end."""
        here = [(self.memory.ctypes.data + int(offset), int(length), 0)]
        there = [(int(address), int(length), 0)]
        here, there = (self.agent.get_xfer_descs(place, "DRAM") for place in (here, there))
        message = bytes.fromhex(message)
        request = self.agent.initialize_xfer(operation, here, there, agent, message)
        state = self.agent.transfer(request)
        while state == "PROC":
            state = self.agent.check_xfer_state(request)
        self.agent.release_xfer_handle(request)
        return state

    def notify(self, agent, message):
        self.agent.send_notif(agent, bytes.fromhex(message))
        return "notified"

    def notifications(self, count):
        """Waits for `count` messages, and answers with each after its sender's name."""
        received = []
        while len(received) < int(count):
            for agent, messages in self.agent.get_new_notifs().items():
                received += [f"{agent}:{message.hex()}" for message in messages]
            time.sleep(0.001)
        return " ".join(received)

    def hammer(self, address, length, agent):
        """Writes and reads until the process is killed."""
        answer("begun")
        for operation in itertools.cycle(["WRITE", "READ"]):
            self.move(operation, 0, address, length, agent, b"?".hex())


def answer(text):
    print(f"@{text}", flush=True)


def main(name, size):
    peer = Peer(name, size)
    answer("ready")
    for line in sys.stdin:
        command, *arguments = line.split()
        answer(getattr(peer, command)(*arguments))


main(*sys.argv[1:])
