package hf

import "cmp"

// fileShape returns the shape of a tensor in files.
func (t Tensor) fileShape() []int {
	if t.FileRows == 0 {
		return t.Shape
	}
	return []int{t.FileRows, t.Shape[1]}
}

// fillMean sets the elements of dst that the file of a resized tensor lacks to the mean of its rows, and returns the
// others. transformers' resize_token_embeddings adds noise of 3e-5 of the rows' spread.
func (w *Weights) fillMean(t Tensor, dst []float32, off int64) (rest []float32, err error) {
	cols := int64(t.Shape[len(t.Shape)-1])
	have := max(int64(t.FileRows)*cols-off, 0)
	if t.FileRows == 0 || have >= int64(len(dst)) {
		return dst, nil
	}
	mean, err := w.mean(t)
	if err != nil {
		return nil, err
	}
	for i := have; i < int64(len(dst)); i++ {
		dst[i] = mean[(off+i)%cols]
	}
	return dst[:have], nil
}

// mean returns the mean of the rows of a tensor's file, rounded once.
func (w *Weights) mean(t Tensor) ([]float32, error) {
	if have, ok := w.means.Load(t.Name); ok {
		return have.([]float32), nil
	}
	cols := t.Shape[1]
	sums, rows := make([]float64, cols), make([]float32, min(max(1, (1<<20)/cols), t.FileRows)*cols)
	for off, n := 0, t.FileRows*cols; off < n; off += len(rows) {
		rows = rows[:min(len(rows), n-off)]
		if err := w.Read(t, rows, int64(off)); err != nil {
			return nil, err
		}
		for i, x := range rows {
			sums[i%cols] += float64(x)
		}
	}
	mean := make([]float32, cols)
	for i := range mean {
		mean[i] = float32(sums[i] / float64(t.FileRows))
	}
	w.means.Store(t.Name, mean)
	return mean, nil
}

// unresized returns the config with the rows in files: PEFT loads an adapter on a base that it resizes after loading.
func (c Config) unresized() *Config {
	c.VocabSize = cmp.Or(c.FileVocab, c.VocabSize)
	return &c
}
