"""What tables say: as a page shows them, and the cells of one row."""


def shown(tables):
    return "\n\n".join(table.markdown() for table in tables)


def cells(tables, *start):
    """Heading -> cell, of the one row that begins with `start`, without those."""
    [row] = [
        dict(list(zip(table.headings, row))[len(start) :])
        for table in tables
        for row in table.rows
        if tuple(row[: len(start)]) == start
    ]
    return row


def numbers(cell):
    """The value of a difference and the ends of its interval, where it has one."""
    return [float(word) for word in cell.replace("[", "").replace("]", "").replace(",", "").split()]
