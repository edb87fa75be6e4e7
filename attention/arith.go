package attention

import (
	"fmt"
	"math"

	"github.com/cprun/cprun/tensor"
)

// score is what Softmax makes of a dot product.
func score[A tensor.Float](x A, p Softmax) A {
	x *= A(p.Scale)
	if p.Softcap > 0 {
		x = A(p.Softcap) * A(math.Tanh(float64(x/A(p.Softcap))))
	}
	return x
}

func dot[A tensor.Float](x, y []A) A {
	var sum A
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

func axpy[A tensor.Float](a A, x, y []A) {
	for i := range y {
		y[i] += a * x[i]
	}
}

func scale[A tensor.Float](a A, y []A) {
	for i := range y {
		y[i] *= a
	}
}

func exp[A tensor.Float](x A) A { return A(math.Exp(float64(x))) }

// rowDot sets d [batch, seq, heads, 1] to the dot products of the rows of x and y.
func rowDot[A tensor.Float](d, x, y array[A]) {
	for i := range d.data {
		n := x.shape[tensor.Dim]
		d.data[i] = dot(x.data[i*n:(i+1)*n], y.data[i*n:(i+1)*n])
	}
}

// eachRow calls f for every batch, query and head with the keys that the query sees.
func eachRow[A tensor.Float](q, k array[A], visible func(i, j int) bool, f func(b, i, h int, keys []int)) {
	var keys []int
	for i := range q.shape[tensor.Seq] {
		keys = keys[:0]
		for j := range k.shape[tensor.Seq] {
			if visible(i, j) {
				keys = append(keys, j)
			}
		}
		for b := range q.shape[tensor.Batch] {
			for h := range q.shape[tensor.Heads] {
				f(b, i, h, keys)
			}
		}
	}
}

func add[A tensor.Float](dst, src View) {
	d, s := load[A](dst), load[A](src)
	axpy(1, s.data, d.data)
	d.store(dst)
}

func set(v View, x float64) {
	switch v.DType() {
	case tensor.F64:
		walk(v, func(y *float64) { *y = x })
	case tensor.F32:
		walk(v, func(y *float32) { *y = float32(x) })
	case tensor.F16, tensor.BF16:
		walk(v, func(y *uint16) { *y = 0 }) // Zero alone comes here
	default:
		panic(fmt.Sprintf("attention: %v is not of floats", v))
	}
}
