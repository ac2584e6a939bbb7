"""The list of known faults is alive: each applies once, and the tests that it names exist and run by default."""

from tools.faults import complaints_about, read_faults

FAULTS = read_faults()


def test_each_fault_applies_and_names_tests() -> None:
    complaints = list(complaints_about(FAULTS))
    assert not complaints, "\n".join(["docs/development/faults.md says how to update an entry:", *complaints])


def test_there_are_many() -> None:
    assert len(FAULTS) >= 60
