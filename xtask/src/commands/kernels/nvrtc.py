"""Compiles one CUDA C file to PTX with NVRTC, which needs no GPU: LIBRARY SOURCE ARCHITECTURE.

The PTX goes to standard output, and the compiler's messages to standard error.
"""

import ctypes
import sys


def main():
    library_path, source_path, architecture = sys.argv[1:]
    nvrtc = ctypes.CDLL(library_path)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(code):
        if code != 0:
            sys.exit(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")

    def text(of):
        size = ctypes.c_size_t()
        check(getattr(nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, f"nvrtcGet{of}")(program, buffer))
        return buffer.value

    with open(source_path, "rb") as source_file:
        source = source_file.read()
    name = source_path.rsplit("/", 1)[-1].encode()
    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    options = (ctypes.c_char_p * len(options))(*options)
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = text("ProgramLog").strip()
    if log:
        sys.stderr.write(log.decode(errors="replace") + "\n")
    check(code)
    sys.stdout.buffer.write(text("PTX"))


main()
