package hf

import (
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// Rows that a file lacks are the mean of its rows, wherever a read begins.
func TestResizedRowsAreTheMean(t *testing.T) {
	const name = "model.embed_tokens.weight"
	have := []float32{1, 2, 4, 6, 8, 9}
	w := weightsOf(t, safetensors.Floats(name, "F32", []int{3, 2}, have),
		safetensors.Floats("lm_head.weight", "F32", []int{3, 2}, have)) // tied
	resized := Tensor{Name: name, Shape: []int{5, 2}, FileRows: 3}
	want := append(have, 13./3, 17./3, 13./3, 17./3)
	for lo := range want {
		for hi := lo; hi <= len(want); hi++ {
			got := make([]float32, hi-lo)
			if err := w.Read(resized, got, int64(lo)); err != nil {
				t.Fatal(err)
			}
			for i, x := range got {
				if x != want[lo+i] {
					t.Errorf("elements %d to %d are %v, want %v", lo, hi, got, want[lo:hi])
					break
				}
			}
		}
	}
	for rows, ok := range map[int]bool{3: true, 2: false, 4: false} {
		resized.FileRows = rows
		if err := w.Check([]Tensor{resized}); (err == nil) != ok {
			t.Errorf("%d rows in the file: %v", rows, err)
		}
	}
}
