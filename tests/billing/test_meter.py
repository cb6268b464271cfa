import uuid

from edge.billing.meter import new_id


def test_ids_are_uuids_of_version_7_that_sort_by_time() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {(uuid.UUID(id).version, uuid.UUID(id).variant) for id in ids} == {(7, uuid.RFC_4122)}
    times = [id[:13] for id in ids]
    assert times == sorted(times)
