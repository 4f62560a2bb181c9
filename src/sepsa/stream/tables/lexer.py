"""The lexer of CSV: it finds where records end. It is compiled, because it reads every byte of a stream.

A quote opens a quoted part only at the start of a field, and a doubled quote is a literal one, as in Arrow's reader.
Records end with LF, CRLF or CR.
"""

from __future__ import annotations

from sepsa.jit import cached

LF, CR, NUL = 10, 13, 0

BLANK, HAS_NUL, OPEN_QUOTE = 1, 2, 4  # flags of a record


@cached()
def line_end(data, at):
    """The place behind the line break after a place, which ends with LF, CRLF or CR; the size if there is none."""
    while at < data.size:
        c = data[at]
        at += 1
        if c == LF:
            break
        if c == CR:
            if at < data.size and data[at] == LF:
                at += 1
            break
    return at


@cached()
def lex(data, separator, quote, at_end, limit, ends, fields, lines, flags):
    """Write the end (after its line break), the fields, lines and flags of each complete record; returns their number.

    An incomplete record is left for the next call, unless the data are `at_end` or it is longer than `limit`: then its
    quotes are ignored, and its first line is a record with the flag `OPEN_QUOTE`.
    """
    n, count, at = data.size, 0, 0
    while at < n and count < ends.size:
        start, width, broken, flag = at, 1, 0, 0
        quoted, field_start, complete = False, True, False
        while at < n:
            c = data[at]
            at += 1
            if quoted:
                if c == quote:
                    if at < n and data[at] == quote:
                        at += 1
                    elif at == n and not at_end:
                        break  # the next byte tells whether it is doubled
                    else:
                        quoted = False
                elif c == NUL:
                    flag |= HAS_NUL
                elif c == LF or (c == CR and (at == n or data[at] != LF)):
                    broken += 1
                if at - start > limit:
                    break
                continue
            if c == separator:
                width += 1
                field_start = True
            elif c == LF:
                complete = True
                break
            elif c == CR:
                if at < n and data[at] == LF:
                    at += 1
                elif at == n and not at_end:
                    break  # LF may follow
                complete = True
                break
            elif c == quote and field_start:
                quoted, field_start = True, False
            else:
                field_start = False
                if c == NUL:
                    flag |= HAS_NUL
        too_long = at - start > limit
        if not complete and quoted and (at_end or too_long):
            flag, width, broken, at = OPEN_QUOTE, 1, 0, line_end(data, start)
            complete = at > 0 and (data[at - 1] == LF or data[at - 1] == CR)
        if not complete and not at_end:
            break
        length = at - start
        if (length == 1 and (data[start] == LF or data[start] == CR)) or (length == 2 and data[start] == CR):
            flag |= BLANK
        ends[count], fields[count], lines[count], flags[count] = at, width, broken + 1, flag
        count += 1
    return count
