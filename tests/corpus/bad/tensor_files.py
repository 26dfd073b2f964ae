"""Tensor files that lie, break off or hold what they should not."""

from __future__ import annotations

import json
import struct

from corpus.bad.building import Q0, T, case, evil_pickle, frame, lora, pack, st, values, w, zip_bytes


def taken_apart():
    """A good file, the length of its header, the header and the data."""
    ok = st(lora())
    n = struct.unpack("<Q", ok[:8])[0]
    return ok, n, ok[8:8 + n], ok[8 + n:]


def info(**kw):
    d = {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]}
    d.update(kw)
    return st({Q0 + ".lora_A.weight": T([4, 32], seed=3, info=d)})


def tensor_file_cases():
    header_cases()
    repeated_key_cases()
    description_cases()
    offset_cases()
    length_cases()
    name_cases()
    many_tensor_cases()
    other_format_cases()


def header_cases():
    ok, n, hdr, data = taken_apart()
    case("st_empty_file", "ST_TRUNCATED", w(b""))
    case("st_seven_bytes", "ST_TRUNCATED", w(b"\x10\0\0\0\0\0\0"))
    case("st_header_len_zero", "ST_HEADER_INVALID", w(struct.pack("<Q", 0)))
    case("st_header_len_past_eof", "ST_TRUNCATED", w(frame(hdr, data, length=len(ok) * 2)), also=["ST_HEADER_LENGTH"])
    case("st_header_len_u64_max", "ST_HEADER_TOO_LARGE", w(frame(hdr, data, length=2**64 - 1)), also=["ST_HEADER_LENGTH"],
         note="8 + length wraps around in unsigned arithmetic")
    case("st_header_len_100mb", "ST_HEADER_TOO_LARGE", w(frame(hdr, data, length=100_000_001)), also=["ST_HEADER_LENGTH", "ST_TRUNCATED"])
    case("st_header_len_big_endian", "ST_HEADER_TOO_LARGE", w(struct.pack(">Q", n) + hdr + data), also=["ST_HEADER_LENGTH"])
    case("st_header_len_short", "ST_HEADER_INVALID", w(frame(hdr, data, length=n - 20)), note="length cuts the JSON")
    case("st_header_not_json", "ST_HEADER_INVALID", w(frame(b"{not json", b"")))
    case("st_header_array", "ST_HEADER_INVALID", w(frame(b"[1,2]", b"")))
    case("st_header_leading_space", "ST_HEADER_INVALID", w(frame(b"  " + hdr, data)), note="the header must begin with {")
    case("st_header_bom", "ST_HEADER_INVALID", w(frame(b"\xef\xbb\xbf" + hdr, data)))
    case("st_header_bad_utf8", "ST_HEADER_INVALID", w(frame(hdr.replace(b"q_proj", b"q\xff\xferoj"), data)))
    case("st_header_two_objects", "ST_HEADER_INVALID", w(frame(hdr.rstrip() + b"{}", data)))
    case("st_header_nul_padding", "ST_HEADER_INVALID", w(frame(hdr.rstrip() + b"\0" * 8, data)), note="padding must be spaces")
    case("st_header_deep", "ST_HEADER_INVALID", w(frame(b'{"__metadata__":' + b'{"a":' * 60000 + b"1" + b"}" * 60000 + b"}", b"")),
         also=["ST_METADATA", "ST_HEADER_TOO_DEEP"], note="must not end in a recursion error or a crash")


def repeated_key_cases():
    _, _, hdr, data = taken_apart()
    case("st_dup_tensor_key", "ST_DUPLICATE_KEY", w(st([(Q0 + ".lora_A.weight", T([4, 32], seed=1)), (Q0 + ".lora_A.weight", T([4, 32], seed=2))])),
         also=["ST_OFFSET_HOLE"], note="a parser that keeps the last one reads other bytes than one that keeps the first")
    twice = [(Q0 + ".lora_A.weight", T([4, 32], seed=1)), (Q0 + ".lora_A.weight", T([32, 4], raw=b"", offsets=[0, 512]))]
    case("st_dup_tensor_same_bytes", "ST_DUPLICATE_KEY", w(st(twice)), also=["ST_OFFSET_OVERLAP"],
         note="same bytes under one name with two shapes; offsets alone do not give it away")
    case("st_dup_metadata", "ST_DUPLICATE_KEY", w(frame(b'{"__metadata__":{"format":"pt"},' + hdr[1:], data)))
    case("st_dup_info_field", "ST_DUPLICATE_KEY", w(frame(
        ('{"%s":{"dtype":"F32","shape":[4,32],"shape":[32,4],"data_offsets":[0,512]}}' % (Q0 + ".lora_A.weight")).encode(),
        pack(values(128, 3), "F32"))))
    case("st_metadata_not_string", "ST_METADATA", w(st({Q0 + ".lora_A.weight": T([4, 32], seed=3)}, metadata={"format": "pt", "rank": 4})))
    case("st_metadata_200kb", "ST_METADATA", w(st(lora(), metadata={"note": "A" * 200000})), also=["ST_HEADER_TOO_LARGE"], note="quota")


def description_cases():
    case("st_unknown_dtype", "ST_BAD_DTYPE", w(info(dtype="F12")))
    case("st_lowercase_dtype", "ST_BAD_DTYPE", w(info(dtype="f32")))
    case("st_shape_negative", "ST_BAD_SHAPE", w(info(shape=[-4, -32])))
    case("st_shape_float", "ST_BAD_SHAPE", w(info(shape=[4.0, 32])))
    case("st_shape_bool", "ST_BAD_SHAPE", w(info(shape=[True, 128])), note="Python takes True for 1")
    case("st_shape_string", "ST_BAD_SHAPE", w(info(shape="4x32")))
    case("st_shape_33_dims", "ST_BAD_SHAPE", w(info(shape=[4, 32] + [1] * 40)), also=["SHAPE_MISMATCH"])
    case("st_shape_overflow_wrap", "ST_OVERFLOW", w(st({Q0 + ".lora_A.weight": T([0], raw=b"", info={"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]})})),
         also=["ST_SIZE_MISMATCH", "ST_BAD_SHAPE"], note="the product is 0 modulo 2**64")
    case("st_shape_bigint", "ST_OVERFLOW", w(info(shape=[10**30, 1])), also=["ST_BAD_SHAPE", "ST_HEADER_INVALID"])
    case("st_declares_4tb", "ST_OFFSET_RANGE", w(info(shape=[10**6, 10**6], data_offsets=[0, 4 * 10**12])),
         also=["ST_TRUNCATED", "QUOTA_EXCEEDED"], note="must be refused before anything is allocated")
    case("st_offsets_reversed", "ST_OFFSET_RANGE", w(info(data_offsets=[512, 0])))
    case("st_offsets_negative", "ST_OFFSET_RANGE", w(info(data_offsets=[-512, 0])))
    case("st_offsets_float", "ST_OFFSET_RANGE", w(info(data_offsets=[0, 512.0])), also=["ST_HEADER_INVALID"])
    case("st_offsets_three", "ST_OFFSET_RANGE", w(info(data_offsets=[0, 256, 512])), also=["ST_HEADER_INVALID"])
    case("st_offsets_missing", "ST_HEADER_INVALID", w(st({Q0 + ".lora_A.weight": T([4, 32], info={"dtype": "F32", "shape": [4, 32]})})), also=["ST_OFFSET_RANGE"])
    case("st_offsets_into_header", "ST_OFFSET_RANGE", w(info(data_offsets=[2**64 - 8, 504])), also=["ST_OVERFLOW", "ST_HEADER_INVALID"])


def offset_cases():
    t = {Q0 + ".lora_A.weight": T([4, 32], seed=1), Q0 + ".lora_B.weight": T([32, 4], seed=2)}
    t[Q0 + ".lora_B.weight"].offsets = [256, 768]
    case("st_offsets_overlap", "ST_OFFSET_OVERLAP", w(st(t)))
    t2 = {Q0 + ".lora_A.weight": T([4, 32], seed=1), Q0 + ".lora_B.weight": T([32, 4], raw=b"", offsets=[0, 512])}
    case("st_offsets_shared", "ST_OFFSET_OVERLAP", w(st(t2)), note="two names own the same bytes")
    t3 = {Q0 + ".lora_A.weight": T([4, 32], seed=1), "gap": T([16], seed=9), Q0 + ".lora_B.weight": T([32, 4], seed=2)}
    h3 = st(t3)
    m = struct.unpack("<Q", h3[:8])[0]
    hh = json.loads(h3[8:8 + m])
    hh.pop("gap")
    hb = json.dumps(hh).encode()
    case("st_hole", "ST_OFFSET_HOLE", w(frame(hb, h3[8 + m:])), note="64 bytes that no tensor owns")
    case("st_leading_hole", "ST_OFFSET_HOLE", w(st({Q0 + ".lora_A.weight": T([4, 32], raw=b"\0" * 1024, info={"dtype": "F32", "shape": [4, 32], "data_offsets": [512, 1024]})})))


def length_cases():
    ok, _, _, _ = taken_apart()
    case("st_size_mismatch", "ST_SIZE_MISMATCH", w(info(shape=[4, 31])))
    case("st_dtype_size_mismatch", "ST_SIZE_MISMATCH", w(info(dtype="F16")))
    case("st_trailing_bytes", "ST_TRAILING_BYTES", w(ok + b"\0" * 16), also=["ST_OFFSET_HOLE"])
    case("st_polyglot_zip_tail", "ST_TRAILING_BYTES", w(ok + zip_bytes([("evil.py", b"print(1)\n")])), also=["ST_OFFSET_HOLE"])
    case("st_truncated_data", "ST_TRUNCATED", w(ok[:-100]), note="an interrupted upload", also=["ST_OFFSET_RANGE"])


def name_cases():
    case("st_name_empty", "ST_BAD_NAME", w(st({**lora(), "": T([4], seed=5)})), also=["UNKNOWN_KEY"])
    case("st_name_nul", "ST_BAD_NAME", w(st({**lora(), Q0 + ".lora_A\0.weight": T([4, 32], seed=5)})), also=["UNKNOWN_KEY"])
    case("st_name_newline", "ST_BAD_NAME", w(st({**lora(), Q0 + ".lora_A.weight\n": T([4, 32], seed=5)})), also=["UNKNOWN_KEY", "DUPLICATE_LOGICAL_KEY"],
         note="a pattern that ends in $ also matches before a final newline")
    case("st_name_lookalike", "ST_BAD_NAME", w(st({**lora(), Q0.replace("q_proj", "q_pr\u043ej") + ".lora_A.weight": T([4, 32], seed=5)})), also=["UNKNOWN_KEY", "UNKNOWN_MODULE"],
         note="Cyrillic letter in the module name")
    case("st_name_fullwidth", "ST_BAD_NAME", w(st({**lora(), Q0.replace("q_proj", "\uff51_proj") + ".lora_A.weight": T([4, 32], seed=5)})), also=["UNKNOWN_KEY", "UNKNOWN_MODULE", "DUPLICATE_LOGICAL_KEY"],
         note="NFKC would turn it into the real name")
    case("st_name_path", "ST_BAD_NAME", w(st({**lora(), "../../../../tmp/x": T([4], seed=5)})), also=["UNKNOWN_KEY"])
    case("st_name_100kb", "ST_BAD_NAME", w(st({**lora(), "a." * 50000: T([4], seed=5)})), also=["UNKNOWN_KEY", "ST_HEADER_TOO_LARGE"])


def many_tensor_cases():
    many = b'{' + b",".join(b'"t%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (i, i, i + 1) for i in range(100_000)) + b"}"
    case("st_100k_tensors", "QUOTA_EXCEEDED", w(frame(many, b"\1" * 100_000)), also=["ST_HEADER_TOO_LARGE", "ST_TOO_MANY_TENSORS"], note="a valid file; 5 MB of header")
    case("st_30k_empty_tensors", "QUOTA_EXCEEDED", w(frame(b'{' + b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(30_000)) + b"}", b"")),
         also=["ST_HEADER_TOO_LARGE", "ST_TOO_MANY_TENSORS"], note="30,000 names, not one byte of data")


def other_format_cases():
    case("st_is_pickle", "ST_HEADER_INVALID", w(evil_pickle()), also=["ST_HEADER_TOO_LARGE", "ST_TRUNCATED", "FORBIDDEN_FILE", "ST_HEADER_LENGTH"], note="a pickle under the safetensors name")
    case("st_is_lfs_pointer", "ST_HEADER_INVALID", w(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 1049\n"),
         also=["ST_HEADER_TOO_LARGE", "LFS_POINTER", "ST_HEADER_LENGTH"], note="cloned without the large files; a message that names it helps")
    case("st_is_html", "ST_HEADER_INVALID", w(b"<!DOCTYPE html><html><title>404</title></html>"), also=["ST_HEADER_TOO_LARGE", "ST_HEADER_LENGTH"])
    case("st_is_gguf", "ST_HEADER_INVALID", w(b"GGUF\3\0\0\0" + b"\0" * 64), also=["ST_HEADER_TOO_LARGE", "UNKNOWN_FORMAT", "ST_HEADER_LENGTH"])
