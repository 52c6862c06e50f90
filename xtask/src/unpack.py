"""Unpacks members of a wheel: WHEEL FOLDER PREFIX..., where members' names begin with a prefix."""

import sys
import zipfile


def main():
    wheel_path, folder, *prefixes = sys.argv[1:]
    with zipfile.ZipFile(wheel_path) as wheel:
        for name in wheel.namelist():
            if name.startswith(tuple(prefixes)):
                # The extraction stays inside the folder for any member name.
                try:
                    wheel.extract(name, folder)
                except OSError as error:
                    sys.exit(f"{name} cannot be unpacked to {folder}: {error.strerror}")


main()
