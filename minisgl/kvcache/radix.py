"""A radix tree over token runs, at the granularity of pages.

The idea is RadixAttention's (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2023).

    page_size 2                     root
                                   /    \\
                     [5 6 7 8] pages 0,3   [9 9] page 4
                      /      \\
           [1 1] page 7      [1 2 3 4] pages 8,2

Two children of a node differ in their first page, so the bytes of that page are the key to a child.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from minisgl.core import Int32

from .allocator import PageAllocator
from .base import Match, PrefixCache


class Node:
    """A run of pages. ``key`` is their tokens as packed int32: runs compare as bytes, in one memcmp.

    ``refs`` counts the locks on this node and on all below it.
    """

    __slots__ = ("children", "key", "pages", "parent", "refs")

    def __init__(self, key: bytes, pages: Int32, parent: Node | None, refs: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.refs = refs
        self.children: dict[bytes, Node] = {}


class RadixCache(PrefixCache):
    """Evicts without ever walking the tree, by an order that is kept up all the time.

    ``_lru`` holds every node without a lock, and in it a child always comes before its parent:

    - whatever touches a node touches its ancestors too, from below upwards, and moves each to the end;
    - a locked node is not in it, nor are its ancestors (they have at least as many locks); when the lock goes, they
      enter from below upwards.

    Hence the first node of ``_lru`` never has a child: it is the least recently used leaf.
    """

    reuses = True

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._unit = 4 * page_size  # bytes of a page's tokens
        self._root = Node(b"", np.empty(0, dtype=np.int32), None, 1)  # locked for good: never in the LRU
        self._lru: OrderedDict[Node, None] = OrderedDict()
        self.num_pages = 0
        self.num_evictable = 0

    def match(self, tokens: Int32) -> Match:
        whole = (len(tokens) - 1) // self._page_size * self._page_size
        node, match_pages, _ = self._walk(tokens[:whole].tobytes())
        self._touch(node)
        return Match(node, match_pages)

    def insert(self, tokens: Int32, pages: Int32) -> Match:
        data = tokens.tobytes()
        node, found, end = self._walk(data)
        if end < len(data):
            rest = pages[end // self._unit :].copy()
            leaf = Node(data[end:], rest, node, 0)
            node.children[data[end : end + self._unit]] = leaf
            self.num_pages += len(rest)
            self.num_evictable += len(rest)
            node, found = leaf, np.concatenate([found, rest])
        self._touch(node)
        return Match(node, found)

    def lock(self, handle: Node) -> None:
        node: Node | None = handle
        while node is not None:
            if node.refs == 0:
                del self._lru[node]
                self.num_evictable -= len(node.pages)
            node.refs += 1
            node = node.parent

    def unlock(self, handle: Node) -> None:
        node: Node | None = handle
        while node is not None:
            node.refs -= 1
            if node.refs == 0:
                self._lru[node] = None
                self.num_evictable += len(node.pages)
            node = node.parent

    def evict(self, count: int) -> int:
        freed = 0
        while freed < count and self._lru:
            leaf = next(iter(self._lru))
            excess = len(leaf.pages) - (count - freed)
            if excess > 0:  # the head of the run may still serve
                gone = leaf.pages[excess:]
                leaf.pages = leaf.pages[:excess].copy()
                leaf.key = leaf.key[: excess * self._unit]
            else:
                gone = leaf.pages
                del self._lru[leaf]
                assert leaf.parent is not None
                del leaf.parent.children[leaf.key[: self._unit]]
            self._allocator.free(gone)
            freed += len(gone)
        self.num_pages -= freed
        self.num_evictable -= freed
        return freed

    def pages(self) -> list[Int32]:
        return [node.pages for node in self._nodes()]

    def _walk(self, data: bytes) -> tuple[Node, Int32, int]:
        """Follows ``data`` from the root: the node where the common prefix ends, its pages, its length in bytes.

        Splits a node that is left in its middle, so that the prefix ends where a node ends. The caller must touch
        the node: a new one is not in the LRU yet.
        """
        node, end, found = self._root, 0, [self._root.pages]
        while end < len(data):
            child = node.children.get(data[end : end + self._unit])
            if child is None:
                break
            whole = data.startswith(child.key, end)
            if not whole:
                child = self._split(child, self._common_pages(child.key, data, end))
            node = child
            found.append(node.pages)
            end += len(node.key)
            if not whole:
                break
        return node, np.concatenate(found), end

    def _common_pages(self, key: bytes, data: bytes, start: int) -> int:
        """How many whole pages ``key`` and ``data[start:]`` have in common."""
        count = min(len(key), len(data) - start) // 4
        differ = np.frombuffer(key, np.int32, count) != np.frombuffer(data, np.int32, count, start)
        first = int(differ.argmax())
        return (first if differ[first] else count) // self._page_size

    def _split(self, node: Node, count: int) -> Node:
        """Puts the first ``count`` pages of ``node`` into a new parent and returns it.

        ``node`` itself stays the lower part: a lock on it still covers what it covered.
        """
        assert node.parent is not None
        cut = count * self._unit
        upper = Node(node.key[:cut], node.pages[:count].copy(), node.parent, node.refs)
        node.parent.children[node.key[: self._unit]] = upper
        upper.children[node.key[cut : cut + self._unit]] = node
        node.key, node.pages, node.parent = node.key[cut:], node.pages[count:].copy(), upper
        return upper

    def _touch(self, node: Node) -> None:
        """Makes ``node`` and its ancestors the most recently used, the ancestors more so."""
        step: Node | None = node
        while step is not None:
            if step.refs == 0:
                self._lru[step] = None
                self._lru.move_to_end(step)
            step = step.parent

    def _nodes(self) -> list[Node]:
        """All nodes but the root, parents before children."""
        todo, out = [self._root], []
        while todo:
            node = todo.pop()
            out.append(node)
            todo.extend(node.children.values())
        return out[1:]

    def check(self) -> None:
        nodes = self._nodes()
        rank = {node: i for i, node in enumerate(self._lru)}

        def need(ok: bool, what: str) -> None:
            if not ok:
                raise RuntimeError(f"Radix tree: {what}.")

        need(self.num_pages == sum(len(n.pages) for n in nodes), "the count of pages is off")
        need(
            self.num_evictable == sum(len(n.pages) for n in nodes if n.refs == 0), "the count of evictable pages is off"
        )
        need(set(rank) == {n for n in nodes if n.refs == 0}, "the LRU does not hold exactly the nodes without a lock")
        for node in nodes:
            need(len(node.key) == len(node.pages) * self._unit > 0, "a node's tokens do not fill its pages")
            need(node.refs >= sum(c.refs for c in node.children.values()), "a node has fewer locks than its children")
            for key, child in node.children.items():
                need(child.parent is node and child.key.startswith(key), "a child is under the wrong key")
                if node.refs == 0:
                    need(rank[child] < rank[node], "a parent comes before its child in the LRU")
