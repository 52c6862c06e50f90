"""A process that stores or loads blocks through an adapter: child.py VERB ENGINE DIRECTORY MODEL [JSON]"""

import json
import sys
import time

import adapters
import engines


def main():
    verb, engine, directory, model, *options = sys.argv[1:]
    options = json.loads(options[0]) if options else {}
    with engines.installed(engine, adapters.newest(engine)) as module:
        adapter = adapters.ADAPTERS[engine](module, directory, model, **options)
        if verb == "store":
            print(json.dumps(adapter.store(range(1, 9))), flush=True)
            time.sleep(60)
        elif verb == "load-twice":
            print(json.dumps(adapter.load(range(1, 9))), flush=True)
            # Between the two steps, the test ends another process.
            sys.stdin.readline()
            print(json.dumps(adapter.load(range(1, 9))), flush=True)
        elif verb == "load-and-stay":
            print(json.dumps(adapter.load(range(1, 9))), flush=True)
            time.sleep(60)
        else:
            print(json.dumps(adapter.load(range(1, 9))), flush=True)
            adapter.close()


if __name__ == "__main__":
    main()
