import subprocess
import sys
import uuid

from edge.billing.meter import new_id


def test_ids_are_uuids_of_version_7_that_sort_by_time() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {(uuid.UUID(id).version, uuid.UUID(id).variant) for id in ids} == {(7, uuid.RFC_4122)}
    times = [id[:13] for id in ids]
    assert times == sorted(times)


def test_a_forked_process_mints_other_ids() -> None:
    code = """
import os
from edge.billing.meter import new_id
new_id()
child = os.fork()
os.write(1, new_id().encode() + b" ")  # one write: unbuffered print ends its line with a second one
if child:
    os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    one, other = done.stdout.split()
    assert one[19:] != other[19:]
