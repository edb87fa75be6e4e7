package partition

import "testing"

func TestKeysTellShapesApart(t *testing.T) {
	shape := func(change func(*Shape)) Shape {
		s := Shape{SeqQ: 12, SeqKV: 12, Size: 3, Layout: Document{Docs: []int{5, 7}},
			Mask: Mask{Band: Band{-4, 0}, Docs: []int{5, 7}}}
		change(&s)
		return s
	}
	changes := []func(*Shape){
		func(*Shape) {},
		func(s *Shape) { s.SeqQ = 11 },
		func(s *Shape) { s.SeqKV = 11 },
		func(s *Shape) { s.Size = 2 },
		func(s *Shape) { s.Mask.Lo = -5 },
		func(s *Shape) { s.Mask.Hi = 1 },
		func(s *Shape) { s.Mask.Docs = nil },
		func(s *Shape) { s.Mask.Docs = []int{6, 6} },
		func(s *Shape) { s.Layout = Document{Docs: []int{6, 6}} },
		func(s *Shape) { s.Layout = Document{} },
		func(s *Shape) { s.Layout = Zigzag{} },
		func(s *Shape) { s.Layout = Striped{} },
		func(s *Shape) { s.Layout = gathered{Zigzag{}, 2} },
		func(s *Shape) { s.Layout = gathered{Zigzag{}, 3} },
		func(s *Shape) { s.Layout = gathered{Striped{}, 3} },
	}
	seen := map[string]int{}
	for i, change := range changes {
		key := shape(change).Key()
		if j, ok := seen[key]; ok {
			t.Errorf("shapes %d and %d have the same key", j, i)
		}
		seen[key] = i
		if again := shape(change).Key(); again != key {
			t.Errorf("shape %d has two keys", i)
		}
	}
}
