"""What strangers may have put into headers and into config.json."""

import json
import struct

GOOD = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def header(entries, data=16):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(**changes):
    return {"a": {**GOOD["a"], **changes}}


HEADERS = {
    "empty file": b"",
    "length cut off": b"\x10\0\0",
    "huge length": struct.pack("<Q", 2**63) + b"{}",
    "length beyond the file": struct.pack("<Q", 1000) + b"{}",
    "no JSON": header(b"hello, world"),
    "not an object": header(b"[]"),
    "deep": header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "not UTF-8": header(b'{"\xff": 1}'),
    "twice the same": header(b'{"a":%s,"a":%s}' % ((json.dumps(GOOD["a"]).encode(),) * 2)),
    "twice the same with an escape": header(
        b'{"a":%s,"a":%s}' % (json.dumps(GOOD["a"]).encode(), json.dumps(GOOD["a"]).replace("dt", "d\\u0074").encode())
    ),
    "negative offset": header(entry(data_offsets=[-16, 0])),
    "backwards": header(entry(data_offsets=[16, 0])),
    "out of the file": header(entry(data_offsets=[0, 16]), 8),
    "far out of the file": header(entry(shape=[2**60], data_offsets=[0, 2**62])),
    "overlap": header({**GOOD, "b": GOOD["a"]}),
    "hole": header({"a": {**GOOD["a"], "data_offsets": [16, 32]}}, 32),
    "trailing bytes": header(GOOD, 17),
    "shape and bytes differ": header(entry(shape=[3, 2])),
    "product overflows": header(entry(shape=[2**32, 2**32, 4], data_offsets=[0, 0]), 0),
    "negative size": header(entry(shape=[-2, -2])),
    "size is text": header(entry(shape=["2", "2"])),
    "unknown dtype": header(entry(dtype="F7")),
    "dtype of half a byte": header(entry(dtype="F4", shape=[4, 8])),
    "no dtype": header({"a": {"shape": [2, 2], "data_offsets": [0, 16]}}),
    "entry is a list": header({"a": ["F32", [2, 2], [0, 16]]}),
    "dtype is an object": header(entry(dtype={"F32": None})),
    "many dimensions": header(entry(shape=[4] + [1] * 1000)),
    "metadata is no object": header({"__metadata__": [1], **GOOD}),
    "name with NUL": header({"a\0b": GOOD["a"]}),
    "name with ..": header({"../../etc/passwd": GOOD["a"]}),
    "absolute name": header({"/etc/passwd": GOOD["a"]}),
    "name of 10 MB": header({"a" * 10_000_000: GOOD["a"]}),
    "no name": header({"": GOOD["a"]}),
}


CONFIGS = {
    "100 MB": b'{"a": "%s"}' % (b"x" * 100_000_000),
    "lists": b'{"a": [%s]}' % (b"[]," * 40_000_000),
    "deep": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "digits": b'{"hidden_size": %s}' % (b"9" * 100_000),
    "not UTF-8": b"\xff\xfe{}",
    "twice": b'{"hidden_size": 1, "hidden_size": 2}',
    "NaN": b'{"hidden_size": NaN}',
    "empty": b"",
}
