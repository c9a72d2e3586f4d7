"""Op lists: ops cast by name, with the rules of Habana's HMP, on any device."""

from mprun.precision.op_lists.lists import OpLists, Unknown, op_lists
from mprun.precision.op_lists.table import CastLog, Table, Watcher, disable_casts, region
from mprun.records.op_list_files import KINDS, Entry, read_list

__all__ = [
    "KINDS",
    "CastLog",
    "Entry",
    "OpLists",
    "Table",
    "Unknown",
    "Watcher",
    "disable_casts",
    "op_lists",
    "read_list",
    "region",
]
