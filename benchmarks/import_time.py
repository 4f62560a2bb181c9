"""What `import sepsa` adds to `import torch`.

    python benchmarks/import_time.py

Writes import_time.json: fresh interpreters take turns, with and without sepsa.
"""

from __future__ import annotations

import subprocess
import sys

from measure import spread, write

CODE = "import time, torch; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    return float(
        subprocess.run(
            [sys.executable, "-c", CODE.format(statement)], capture_output=True, text=True, check=True
        ).stdout
    )


def main() -> None:
    for _ in range(2):
        seconds("import sepsa")
    added = spread([seconds("import sepsa") for _ in range(11)])
    median, low, high = (1e3 * added[key] for key in ("median", "q25", "q75"))
    print(f"import sepsa adds {median:.0f} ms [{low:.0f}, {high:.0f}] to import torch, wanted <= 200")
    write(__file__, {"seconds_added": added, "wanted": 0.2})


if __name__ == "__main__":
    main()
