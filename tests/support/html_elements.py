"""A page of HTML as a list of its elements."""

from html.parser import HTMLParser

VOID = {"meta", "img", "source", "input", "br"}


class Elements(HTMLParser):
    """The elements of a page in order, with their attributes and the text inside; checks that they close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.all = [], []
        self.feed(text)
        assert not self.open

    def handle_startendtag(self, tag, attributes):
        self.all.append({"tag": tag, "text": "", "inside": [e["tag"] for e in self.open], **dict(attributes)})

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(self.all[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def tagged(self, *tags):
        return [element for element in self.all if element["tag"] in tags]
