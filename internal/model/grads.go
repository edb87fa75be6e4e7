package model

// divide finds the gradients of each bucket that products set, and the others.
func (m *Model) divide(grads []View) {
	m.products, m.rest = make([][]*weight, len(m.flat.Buckets)), make([][]View, len(m.flat.Buckets))
	for i, p := range m.flat.Params {
		if b := m.flat.Of(i); p.Product {
			m.products[b] = append(m.products[b], m.at(p))
		}
	}
	for b, g := range grads {
		for _, r := range m.flat.Rest(b) {
			m.rest[b] = append(m.rest[b], r.of(g))
		}
	}
}

// beginGrads announces the gradients of a bucket. In a fresh pass it zeroes those that no product sets.
func (m *Model) beginGrads(bucket int) {
	fresh := m.opt.Hooks.Begin != nil && m.opt.Hooks.Begin(bucket)
	for _, w := range m.products[bucket] {
		w.fresh = fresh
	}
	if fresh {
		m.ops.Zero(m.rest[bucket]...)
	}
}

// doneGrads zeroes the gradients that had no product, as without tokens, and ends the bucket.
func (m *Model) doneGrads(bucket int) error {
	for _, w := range m.products[bucket] {
		if w.fresh {
			m.ops.Zero(w.g)
		}
	}
	if m.opt.Hooks.Done == nil {
		return nil
	}
	return m.opt.Hooks.Done(bucket)
}
