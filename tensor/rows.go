package tensor

// Gather returns a new dense host view of the positions of v that rows names, in that order: its row
// i is position rows[i] on the Seq axis of v. v is a host view, strided in any way.
func Gather(v View, rows []int) View {
	out := New(v.dtype, v.shape[Batch], len(rows), v.shape[Heads], v.shape[Dim])
	for i, row := range rows {
		Copy(out.Slice(Seq, i, i+1), v.Slice(Seq, row, row+1))
	}
	return out
}

// Scatter copies src back to where Gather took it from: row i of src goes to position rows[i] on the
// Seq axis of dst. Other positions of dst keep what they hold. Both are host views of one element
// type.
func Scatter(dst, src View, rows []int) {
	for i, row := range rows {
		Copy(dst.Slice(Seq, row, row+1), src.Slice(Seq, i, i+1))
	}
}
