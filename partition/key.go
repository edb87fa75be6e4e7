package partition

import (
	"encoding/binary"
	"fmt"
)

// Key returns a string that is equal for equal shapes: what caches know them by. It is not for
// reading.
func (s Shape) Key() string {
	b := make([]byte, 0, 64+3*len(s.Mask.Docs)+18*len(s.Mask.Slices))
	for _, x := range []int{s.SeqQ, s.SeqKV, s.Size, s.Mask.Lo, s.Mask.Hi} {
		b = binary.AppendVarint(b, int64(x))
	}
	b = appendList(b, s.Mask.Docs)
	b = binary.AppendVarint(b, int64(len(s.Mask.Slices)))
	for _, t := range s.Mask.Slices {
		for _, x := range [...]int{t.Q.Lo, t.Q.Hi, t.K.Lo, t.K.Hi, t.Band.Lo, t.Band.Hi} {
			b = binary.AppendVarint(b, int64(x))
		}
	}
	b = binary.AppendVarint(b, int64(len(s.Mask.Stands)))
	for _, x := range s.Mask.Stands {
		b = binary.AppendVarint(binary.AppendVarint(b, int64(x.End)), int64(x.Ahead))
	}
	layout := s.Layout
	if r, ok := layout.(ready); ok {
		layout = r.Layout
	}
	switch l := layout.(type) {
	case Document:
		b = appendList(append(b, l.Name()...), l.Docs)
		for _, x := range l.Bands {
			b = binary.AppendVarint(binary.AppendVarint(b, int64(x.Lo)), int64(x.Hi))
		}
	case DocumentZigzag:
		b = appendList(append(b, l.Name()...), l.Docs)
	default:
		b = fmt.Appendf(b, "%#v", l)
	}
	return string(b)
}

func appendList(b []byte, list []int) []byte {
	b = binary.AppendVarint(b, int64(len(list)))
	for _, x := range list {
		b = binary.AppendVarint(b, int64(x))
	}
	return b
}
