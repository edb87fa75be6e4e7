package tensor_test

import (
	"context"
	"fmt"

	"github.com/cprun/cprun/tensor"
)

// Queries, keys and values of one packed tensor are three views of the same memory. Nothing is copied.
func ExampleView_Slice() {
	packed := tensor.New(tensor.F32, 5, 3*2, 4) // [batch 1, seq 5, heads of q, k and v, dim 4]
	q, k := packed.Slice(tensor.Heads, 0, 2), packed.Slice(tensor.Heads, 2, 4)
	fmt.Println(q.Shape(), q.Strides(), q.IsDense())
	fmt.Println("k begins at element", k.Offset())

	tensor.Data[float32](k)[0] = 7
	fmt.Println("in the packed tensor it is", tensor.Data[float32](packed)[k.Offset()])
	// Output:
	// [1 5 2 4] [120 24 4 1] false
	// k begins at element 8
	// in the packed tensor it is 7
}

// An arena gives memory back in the order of a stack. What is allocated in the same order lies at the
// same place in every step.
func ExampleArena() {
	arena := tensor.NewHostArena(1 << 20)
	for step := range 2 {
		mark := arena.Mark()
		activations := arena.Alloc(tensor.F32, 16, 64)
		fmt.Printf("step %d: %v at element %d\n", step, activations.Shape(), activations.Offset())
		arena.Release(mark)
	}
	fmt.Println("at most", arena.Peak(), "bytes")
	// Output:
	// step 0: [1 1 16 64] at element 0
	// step 1: [1 1 16 64] at element 0
	// at most 4096 bytes
}

// A stream runs queued work in order while the caller continues. An event orders two streams.
func ExampleHostStream() {
	compute, copies := tensor.NewHostStream("compute"), tensor.NewHostStream("copies")
	defer compute.Close()
	defer copies.Close()

	sum := 0
	compute.Do("add", func() error { sum += 2; return nil })
	copies.Wait(compute.Record()) // copies goes on when compute has got this far
	copies.Do("read", func() error { fmt.Println("sum", sum); return nil })
	fmt.Println(copies.Sync(context.Background()))
	// Output:
	// sum 2
	// <nil>
}

// Gather takes the rows of one rank out of a sequence, and Scatter puts them back.
func ExampleGather() {
	sequence := tensor.FromSlice([]int32{10, 11, 12, 13}, 4, 1, 1)
	part := tensor.Gather(sequence, []int{0, 3})
	fmt.Println(tensor.Data[int32](part))

	whole := tensor.New(tensor.I32, 4, 1, 1)
	tensor.Scatter(whole, part, []int{0, 3})
	fmt.Println(tensor.Data[int32](whole))
	// Output:
	// [10 13]
	// [10 0 0 13]
}
