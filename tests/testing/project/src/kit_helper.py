calls = 0


def count():
    global calls
    calls += 1
    return calls
