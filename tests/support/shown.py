"""What tables say, as a page shows them."""


def shown(tables):
    return "\n\n".join(table.markdown() for table in tables)
