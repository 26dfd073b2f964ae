"""Archives that climb out, blow up, lie or are damaged."""

from __future__ import annotations

import stat
import struct
import tarfile
import zipfile

from corpus.bad.building import case, config, files, tar_bytes, zip_bytes


def archive_cases():
    ok = files()
    good = [(k, v) for k, v in ok.items()]
    cfg, wts = ok["adapter_config.json"], ok["adapter_model.safetensors"]

    def z(cid, code, extra=(), base=good, note="", also=(), raw=None, **kw):
        case(cid, code, raw if raw is not None else zip_bytes([*base, *extra]), form="zip", note=note, also=also, **kw)
    z("zip_traversal", "ARCHIVE_PATH", [("../../corpus_escape.txt", b"x")])
    z("zip_traversal_middle", "ARCHIVE_PATH", [("a/../../corpus_escape.txt", b"x")])
    z("zip_absolute", "ARCHIVE_PATH", [("/tmp/corpus_escape.txt", b"x")])
    z("zip_backslash", "ARCHIVE_PATH", [("..\\..\\corpus_escape.txt", b"x")])
    z("zip_drive", "ARCHIVE_PATH", [("C:\\corpus_escape.txt", b"x")])
    z("zip_nul_name", "ARCHIVE_BAD_NAME", [("adapter\0.txt", b"x")], also=["ARCHIVE_CORRUPT", "ARCHIVE_PATH", "UNEXPECTED_FILE"])
    z("zip_device_name", "ARCHIVE_BAD_NAME", [("CON.json", b"x"), ("nul.safetensors", b"x")], also=["UNEXPECTED_FILE"])
    z("zip_trailing_dot", "ARCHIVE_BAD_NAME", [("adapter_config.json.", b"{}"), ("adapter_model.safetensors ", b"")], also=["UNEXPECTED_FILE"], note="the same file on some systems")
    z("zip_rtl_name", "ARCHIVE_BAD_NAME", [("adapter_\u202enosj.exe", b"x")], also=["UNEXPECTED_FILE"])
    z("zip_symlink", "UNSAFE_LINK", [("link", b"/nonexistent/target", stat.S_IFLNK | 0o777)], also=["ARCHIVE_SPECIAL_FILE"])
    z("zip_symlink_weights", "UNSAFE_LINK", [("adapter_model.safetensors", b"/nonexistent/target", stat.S_IFLNK | 0o777)], base=[("adapter_config.json", cfg)], also=["ARCHIVE_SPECIAL_FILE"])
    z("zip_duplicate_entry", "ARCHIVE_DUPLICATE", [("adapter_config.json", config(lora_alpha=8000))], note="first-wins and last-wins readers see different adapters")
    z("zip_case_collision", "ARCHIVE_DUPLICATE", [("ADAPTER_CONFIG.JSON", config(lora_alpha=8000))], also=["UNEXPECTED_FILE"])
    z("zip_unicode_collision", "ARCHIVE_DUPLICATE", [("r\u00e9sum\u00e9.md", b"a"), ("re\u0301sume\u0301.md", b"b")], also=["ARCHIVE_BAD_NAME", "UNEXPECTED_FILE"], note="NFC and NFD of one name")
    z("zip_file_and_directory", "ARCHIVE_DUPLICATE", [("adapter_config.json/x", b"x")], also=["ARCHIVE_BAD_NAME", "UNEXPECTED_FILE"])
    z("zip_bomb", "ARCHIVE_BOMB", [("README.md", b"\0" * (64 << 20))], also=["QUOTA_EXCEEDED"], note="64 MiB out of 64 KiB")
    z("zip_2000_entries", "ARCHIVE_TOO_MANY_ENTRIES", [(f"d/{i}", b"") for i in range(2000)], also=["QUOTA_EXCEEDED"])
    raw = bytearray(zip_bytes([*good, ("README.md", b"A" * 100000)]))
    for sig, off in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):   # declared uncompressed size of the last entry
        p = raw.rfind(sig)
        raw[p + off:p + off + 4] = struct.pack("<I", 10)
    z("zip_lying_size", "ARCHIVE_CORRUPT", raw=bytes(raw), also=["ARCHIVE_BOMB"], note="100,000 bytes declared as 10")
    raw = bytearray(zip_bytes(good, zipfile.ZIP_STORED))
    p = raw.find(wts[:64]) + 200
    raw[p] ^= 0xFF
    z("zip_bad_crc", "ARCHIVE_CORRUPT", raw=bytes(raw))
    z("zip_truncated", "ARCHIVE_CORRUPT", raw=zip_bytes(good)[:-40])
    raw = bytearray(zip_bytes(good))
    for sig, off in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        i = raw.find(sig)
        while i >= 0:
            raw[i + off] |= 1
            i = raw.find(sig, i + 4)
    z("zip_encrypted_flag", "ARCHIVE_UNSUPPORTED", raw=bytes(raw), also=["ARCHIVE_CORRUPT"])
    z("zip_nested", "MISSING_CONFIG", raw=zip_bytes([("adapter.zip", zip_bytes(good))]), also=["UNEXPECTED_FILE", "MISSING_WEIGHTS"], note="never unpacked twice")
    z("zip_name_mismatch", "ARCHIVE_CORRUPT", raw=zip_bytes(good, zipfile.ZIP_STORED).replace(b"adapter_config.json", b"adapter_cOnfig.json", 1), note="local header and directory give different names")

    def tar(cid, code, extra=(), base=good, gz=False, note="", also=(), raw=None):
        case(cid, code, raw if raw is not None else tar_bytes([*base, *extra], gz), form="tar.gz" if gz else "tar", note=note, also=also)
    tar("tar_traversal", "ARCHIVE_PATH", [("../corpus_escape.txt", b"x")])
    tar("tar_absolute", "ARCHIVE_PATH", [("/tmp/corpus_escape.txt", b"x")])
    tar("tar_symlink", "UNSAFE_LINK", [("l", None, {"type": tarfile.SYMTYPE, "linkname": "/nonexistent"})])
    tar("tar_symlink_then_file", "UNSAFE_LINK", [("out", None, {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("out/corpus_escape.txt", b"x")], also=["ARCHIVE_PATH"])
    tar("tar_symlink_chain", "UNSAFE_LINK", [("a", None, {"type": tarfile.SYMTYPE, "linkname": "."}), ("a/b", None, {"type": tarfile.SYMTYPE, "linkname": "../.."}), ("a/b/corpus_escape.txt", b"x")], also=["ARCHIVE_PATH"])
    tar("tar_hardlink", "UNSAFE_LINK", [("h", None, {"type": tarfile.LNKTYPE, "linkname": "../../etc/hostname"})], also=["ARCHIVE_PATH"])
    tar("tar_fifo", "ARCHIVE_SPECIAL_FILE", [("adapter_model.safetensors", None, {"type": tarfile.FIFOTYPE})], base=[("adapter_config.json", cfg)], note="opening it would block for ever")
    tar("tar_device", "ARCHIVE_SPECIAL_FILE", [("zero", None, {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5})])
    tar("tar_setuid", "ARCHIVE_SPECIAL_FILE", [("run.sh", b"#!/bin/sh\n", {"mode": 0o4755})], also=["UNEXPECTED_FILE", "FORBIDDEN_FILE"])
    tar("tar_duplicate", "ARCHIVE_DUPLICATE", [("adapter_config.json", config(lora_alpha=8000))])
    tar("tar_dot_duplicate", "ARCHIVE_DUPLICATE", [("./adapter_config.json", config(lora_alpha=8000))], note="same path once normalised")
    tar("tar_gz_bomb", "ARCHIVE_BOMB", [("README.md", b"\0" * (64 << 20))], gz=True, also=["QUOTA_EXCEEDED"])
    t = bytearray(tar_bytes(good))
    tar("tar_truncated", "ARCHIVE_CORRUPT", raw=bytes(t[:len(cfg) + 900]))
    case("tar_gz_garbage_tail", "ARCHIVE_CORRUPT", tar_bytes(good, gz=True)[:-30], form="tar.gz", note="checksum cut off")
