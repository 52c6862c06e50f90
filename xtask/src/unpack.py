"""Unpacks what is wanted of a wheel: WHEEL FOLDER PREFIX..., each prefix that of members' names."""

import sys
import zipfile


def main():
    wheel_path, folder, *prefixes = sys.argv[1:]
    with zipfile.ZipFile(wheel_path) as wheel:
        for name in wheel.namelist():
            if name.startswith(tuple(prefixes)):
                # It keeps to the folder, whatever the name says.
                try:
                    wheel.extract(name, folder)
                except OSError as error:
                    sys.exit(f"{name} cannot be unpacked to {folder}: {error.strerror}")


main()
