// Package check checks the arguments of a communicator's calls, with the same errors on every transport: ranks out of
// range, views that cannot be moved, parts that do not fit.
package check

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory.
type View = tensor.View

// Op is a reduction.
type Op interface {
	// Valid reports whether the reduction exists.
	Valid() bool
	// String returns its name in errors.
	String() string
}

// Rules are the rules for messages of one rank of a group.
type Rules struct {
	Rank, Size int
	// Memory checks where a view lies. Its error begins with a verb, after the view's name.
	Memory func(v View) error
}

// OnHost checks that a view lies in host memory. It is the Memory of groups that move only that.
func OnHost(v View) error {
	if _, ok := v.Memory().(*tensor.Host); !ok {
		return fmt.Errorf("is not host memory (%v): this group moves host memory only", v)
	}
	return nil
}

// view checks one view.
func (r Rules) view(v View) error {
	switch {
	case v.IsZero():
		return errors.New("is an empty View without memory")
	case v.DType() == tensor.Invalid:
		return errors.New("has no element type")
	case !v.IsDense():
		return fmt.Errorf("is not dense (%v): copy it to a dense view first", v)
	}
	return r.Memory(v)
}

func (r Rules) named(what string, v View) error {
	if err := r.view(v); err != nil {
		return fmt.Errorf("%s %w", what, err)
	}
	return nil
}

func (r Rules) pair(dst, src View) error {
	if err := r.named("dst", dst); err != nil {
		return err
	}
	return r.named("src", src)
}

// AllReduce checks the arguments of that call, as the methods below do.
func (r Rules) AllReduce(v View, op Op) error {
	if err := r.named("the view", v); err != nil {
		return err
	}
	return reduction(v, op)
}

// AllGather checks that dst has a part like src for each rank.
func (r Rules) AllGather(dst, src View) error {
	if err := r.pair(dst, src); err != nil {
		return err
	}
	return r.parts("dst", dst, "src", src)
}

// ReduceScatter checks that src has a part like dst for each rank.
func (r Rules) ReduceScatter(dst, src View, op Op) error {
	if err := r.pair(dst, src); err != nil {
		return err
	}
	if err := r.parts("src", src, "dst", dst); err != nil {
		return err
	}
	return reduction(src, op)
}

// Broadcast checks the view and its root.
func (r Rules) Broadcast(v View, root int) error {
	if err := r.named("the view", v); err != nil {
		return err
	}
	if root < 0 || root >= r.Size {
		return fmt.Errorf("root %d of a group of %d", root, r.Size)
	}
	return nil
}

// parts checks that whole has a part like part for each rank. If part lies in whole, it must be the rank's own part:
// elsewhere it would be overwritten before it is sent, or overwrite data that is not yet sent.
func (r Rules) parts(wholeName string, whole View, partName string, part View) error {
	if whole.DType() != part.DType() {
		return fmt.Errorf("%s is %s, %s is %s: both need one element type", wholeName, whole.DType(), partName,
			part.DType())
	}
	if whole.Size() != r.Size*part.Size() {
		return fmt.Errorf("%s has %d elements, %s has %d: with %d ranks it needs %d",
			wholeName, whole.Size(), partName, part.Size(), r.Size, r.Size*part.Size())
	}
	w, p := spanOf(whole), spanOf(part)
	if w.overlaps(p) && p.lo != w.lo+uint64(r.Rank)*(p.hi-p.lo) {
		return fmt.Errorf("%s lies in %s and is not part %d of it: only this rank's own part may", partName, wholeName,
			r.Rank)
	}
	return nil
}

func reduction(v View, op Op) error {
	if !op.Valid() {
		return fmt.Errorf("reduction %d is unknown: use Sum, Max or Min", op)
	}
	switch v.DType() {
	case tensor.F32, tensor.F64, tensor.I64, tensor.I32:
		return nil
	}
	return fmt.Errorf("%s of %s: reductions support float32, float64, int64 and int32", op, v.DType())
}

// Bytes returns the size of a view's elements.
func Bytes(v View) int64 { return int64(v.Size()) * int64(v.DType().Size()) }

// Same reports whether two dense views are the same memory.
func Same(a, b View) bool { return spanOf(a) == spanOf(b) }

// A span is the memory of a dense view, as addresses of its device.
type span struct{ lo, hi uint64 }

func spanOf(v View) span {
	return span{v.Addr(), v.Addr() + uint64(Bytes(v))}
}

func (s span) overlaps(t span) bool { return s.lo < s.hi && t.lo < t.hi && s.lo < t.hi && t.lo < s.hi }

// A message is a view to or from a rank. comm.Message has the same fields.
type message interface {
	~struct {
		Peer int
		View View
	}
}

// A plain is a message with accessible fields.
type plain struct {
	Peer int
	View View
}

// Exchange checks the messages of a call: each peer is in the group, each view can be moved, and the messages of the
// rank to itself match in number and size.
func Exchange[M message](r Rules, send, recv []M) error {
	if err := side(r, "send", send); err != nil {
		return err
	}
	if err := side(r, "receive", recv); err != nil {
		return err
	}
	to, from := own(r.Rank, send), own(r.Rank, recv)
	if len(to) != len(from) {
		return fmt.Errorf("%d messages to the own rank, %d from it", len(to), len(from))
	}
	for i := range to {
		if to[i] != from[i] {
			return fmt.Errorf("message %d to the own rank has %d bytes, it is received into %d", i, to[i], from[i])
		}
	}
	return nil
}

// side checks the messages one by one.
func side[M message](r Rules, verb string, ms []M) error {
	for i := range ms {
		m := plain(ms[i])
		if m.Peer < 0 || m.Peer >= r.Size {
			return fmt.Errorf("%s %d names rank %d of a group of %d", verb, i, m.Peer, r.Size)
		}
		if err := r.view(m.View); err != nil {
			return fmt.Errorf("the view of %s %d (rank %d) %w", verb, i, m.Peer, err)
		}
	}
	return nil
}

// own returns the bytes of each message of the rank to or from itself.
func own[M message](rank int, ms []M) (bytes []int64) {
	for i := range ms {
		if m := plain(ms[i]); m.Peer == rank {
			bytes = append(bytes, Bytes(m.View))
		}
	}
	return bytes
}

// Detail returns an exchange's text in traces: "1024 bytes to rank 2, 1024 bytes from rank 0".
func Detail[M message](send, recv []M) string {
	return strings.Join(append(detail("to", send), detail("from", recv)...), ", ")
}

// detail sums the messages by peer, in the order of their first messages.
func detail[M message](way string, ms []M) (parts []string) {
	var peers []int
	bytes := map[int]int64{}
	for _, m := range ms {
		p := plain(m)
		if _, seen := bytes[p.Peer]; !seen {
			peers = append(peers, p.Peer)
		}
		bytes[p.Peer] += Bytes(p.View)
	}
	for _, p := range peers {
		parts = append(parts, fmt.Sprintf("%d bytes %s rank %d", bytes[p], way, p))
	}
	return parts
}

// Collective returns a collective's text in traces.
func Collective(v tensor.View, ranks int) string {
	return fmt.Sprintf("%d bytes over %d ranks", Bytes(v), ranks)
}
