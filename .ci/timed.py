"""python3 .ci/timed.py TABLE NAME COMMAND...: run a command, and add a line with its seconds to the table."""

import resource
import subprocess
import sys
import time

table, name, *command = sys.argv[1:]
started = time.monotonic()
status = subprocess.call(command)
seconds = time.monotonic() - started
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(table, "a", encoding="utf-8") as lines:
    verdict = "passed" if status == 0 else f"FAILED ({status})"
    lines.write(f"{name:<24} {seconds:8.0f} {used.ru_utime + used.ru_stime:10.0f}  {verdict}\n")
sys.exit(status if status >= 0 else 128 - status)
