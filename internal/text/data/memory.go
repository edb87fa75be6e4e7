package data

import "runtime"

// Held returns the bytes that a process keeps in memory for the samples: tokens that it has encoded, and tables of
// documents. Tokens in files take none.
func (l *Loader) Held() int64 {
	n := l.data.held() + int64(8*len(l.ends)+4*len(l.valid))
	if k := l.pack; k != nil {
		n += int64(8*len(k.starts) + 4*len(k.lens) + 4*len(k.order) + 8*len(k.first))
	}
	return n
}

// Held returns what Loader.Held does, over all loaders.
func (m *Mixture) Held() (n int64) {
	for _, l := range m.parts {
		n += l.Held()
	}
	return n
}

func (d *Dataset) held() (n int64) {
	for _, p := range d.parts {
		n += heldBy(p.codec)
		if p.labels != nil {
			n += heldBy(p.labels.codec) + int64(4*len(p.labels.targets))
		}
	}
	return n
}

func heldBy(c codec) int64 {
	switch c := c.(type) {
	case *encodedFile:
		return int64(4*cap(c.ids) + 8*cap(c.docs))
	case heldText:
		return int64(len(c.text))
	case tokenFile:
		return int64(8 * len(c.docs))
	}
	return 0
}

// Encoding returns the memory of a process that encodes the text itself; 0: the cache has its tokens. It was measured
// with byte-level BPE of 128,000 tokens: parsing tokenizer.json takes 8 times the file, a text in flight 5 times its
// bytes, and growing lists half as much again.
func (d *Dataset) Encoding() int64 {
	if d.encoded == 0 {
		return 0
	}
	return d.held()*3/2 + 5*min(d.encoded, int64(runtime.GOMAXPROCS(0))*5*batchBytes) + 8*d.tokenizer
}
