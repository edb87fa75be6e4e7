package scan

import (
	"fmt"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Halo sets before, [segments*batch, h.Rows, 1, cols], to the rows before each segment of the rank in its document, on
// whichever ranks they are, and to zeros before the document's begin. x, [batch, rows, 1, cols], has the rank's rows.
// Both are dense, of one type. A segment's samples are side by side. Halo queues its work and returns.
func (s *Scan) Halo(before, x View, h *Halo) error {
	for _, b := range h.Zero {
		s.Mover.Zero(block(x, before, b))
	}
	for _, c := range h.Copy {
		s.Mover.Copy(block(x, before, c.Dst), block(x, before, c.Src))
	}
	var send, recv []comm.Message
	for _, m := range h.Send {
		send = messages(send, m.Peer, block(x, before, m.Block))
	}
	for _, m := range h.Recv {
		recv = messages(recv, m.Peer, block(x, before, m.Block))
	}
	return s.exchange("halo", send, recv)
}

// HaloBackward adds the gradients of the rows before each segment, of the shape of Halo's before, to those of the rows
// themselves, dx, in a fixed order.
func (s *Scan) HaloBackward(dx, dbefore View, h *Halo) error {
	defer s.Arena.Release(s.Arena.Mark()) // every transfer has been waited for by then
	var send, recv []comm.Message
	for _, m := range h.Recv {
		send = messages(send, m.Peer, block(dx, dbefore, m.Block))
	}
	came := make([]View, len(h.Send))
	for i, m := range h.Send {
		came[i] = s.Arena.Alloc(dx.DType(), dx.Len(tensor.Batch), m.Block.Hi-m.Block.Lo, 1, dx.Len(tensor.Dim))
		recv = messages(recv, m.Peer, came[i])
	}
	if err := s.exchange("halo gradients", send, recv); err != nil {
		return err
	}
	for _, c := range h.Copy {
		s.Mover.Add(block(dx, dbefore, c.Src), block(dx, dbefore, c.Dst))
	}
	for i, m := range h.Send {
		s.Mover.Add(block(dx, dbefore, m.Block), came[i])
	}
	return nil
}

// exchange exchanges messages, and makes the stream wait for them.
func (s *Scan) exchange(label string, send, recv []comm.Message) error {
	if len(send)+len(recv) == 0 {
		return nil
	}
	defer s.label(label)()
	moving, err := s.Comm.Exchange(send, recv)
	if err != nil {
		return fmt.Errorf("%s: %w", label, err)
	}
	moving.Wait()
	return nil
}

// block returns a block of every sample, [batch, rows, 1, cols].
func block(x, before View, b ring.Block) View {
	if b.Buf > 0 {
		n := x.Len(tensor.Batch)
		x = before.Slice(tensor.Batch, (b.Buf-1)*n, b.Buf*n)
	}
	return x.Slice(tensor.Seq, b.Lo, b.Hi)
}

// messages appends the rows of each sample: rows of several are not dense.
func messages(list []comm.Message, peer int, rows View) []comm.Message {
	for i := range rows.Len(tensor.Batch) {
		list = append(list, comm.Message{Peer: peer, View: rows.Slice(tensor.Batch, i, i+1)})
	}
	return list
}
