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


#: What is said of each: that is what keeps a header from being refused for another reason than the one it is here for.
NOT_WHOLE = "is not a whole safetensors file: "
SAID_OF_HEADERS = {
    "empty file": NOT_WHOLE + "header too small",
    "length cut off": NOT_WHOLE + "header too small",
    "huge length": NOT_WHOLE + "header too large",
    "length beyond the file": NOT_WHOLE + "invalid header length",
    "no JSON": NOT_WHOLE + "invalid JSON in header: expected value",
    "not an object": NOT_WHOLE + "invalid JSON in header: invalid type: sequence",
    "deep": NOT_WHOLE + "invalid JSON in header: recursion limit",
    "not UTF-8": NOT_WHOLE + "invalid UTF-8 in header",
    "twice the same": "has a broken header: a key stands there twice",
    "twice the same with an escape": "has a broken header: a key stands there twice",
    "negative offset": NOT_WHOLE + "invalid JSON in header: invalid value: integer `-16`",
    "backwards": NOT_WHOLE + "invalid offset for tensor `a`",
    "out of the file": NOT_WHOLE + "incomplete metadata, file not fully covered",
    "far out of the file": NOT_WHOLE + "overflow",
    "overlap": NOT_WHOLE + "invalid offset for tensor `",  # either of the two
    "hole": NOT_WHOLE + "invalid offset for tensor `a`",
    "trailing bytes": NOT_WHOLE + "incomplete metadata, file not fully covered",
    "shape and bytes differ": NOT_WHOLE + "invalid shape, data type, or offset",
    "product overflows": NOT_WHOLE + "overflow",
    "negative size": NOT_WHOLE + "invalid JSON in header: invalid value: integer `-2`",
    "size is text": NOT_WHOLE + "invalid JSON in header: invalid type: string",
    "unknown dtype": NOT_WHOLE + "invalid JSON in header: unknown variant `F7`",
    "dtype of half a byte": "a has the dtype F4, which is no number format of weights",
    "no dtype": NOT_WHOLE + "invalid JSON in header: missing field `dtype`",
    "entry is a list": "has a header that says in no known form what it holds",
    "dtype is an object": "has a header that says in no known form what it holds",
    "many dimensions": "a has 1,001 dimensions: the file is broken",
    "metadata is no object": "has a __metadata__ that the format does not allow",
    "name with NUL": "'a\\x00b' is no tensor's name",
    "name with ..": "'../../etc/passwd' is no tensor's name",
    "absolute name": "'/etc/passwd' is no tensor's name",
    "name of 10 MB": "a tensor has a name of 10,000,000 characters",
    "no name": "a tensor has a name of 0 characters",
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
NO_JSON = "config.json is not JSON: "
SAID_OF_CONFIGS = {
    "100 MB": "config.json has 100,000,009 bytes: too many to be what its name says",
    "lists": "config.json has 120,000,009 bytes: too many to be what its name says",
    "deep": NO_JSON + "maximum recursion depth exceeded",
    "digits": NO_JSON + "Exceeds the limit (4300 digits)",
    "not UTF-8": NO_JSON,
    "twice": NO_JSON + "a key stands there twice",
    "NaN": "config.json: hidden_size is nan; it must be a whole number",
    "empty": NO_JSON + "Expecting value",
}
