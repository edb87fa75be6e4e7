package tokenizer

// trie finds texts by their bytes. Node 0 is the root. The zero value is empty.
type trie struct {
	next map[uint64]int32 // a node by its parent's number and a byte
	ends []int32          // of each node, what the caller has set; -1: no text ends there
}

// node returns the node of a text, which it makes where there is none.
func (t *trie) node(text string) int32 {
	if t.next == nil {
		t.next, t.ends = map[uint64]int32{}, []int32{-1}
	}
	at := int32(0)
	for i := range len(text) {
		key := pair(at, int32(text[i]))
		to, ok := t.next[key]
		if !ok {
			to = int32(len(t.ends))
			t.next[key] = to
			t.ends = append(t.ends, -1)
		}
		at = to
	}
	return at
}
