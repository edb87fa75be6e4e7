package train

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/kernels"
)

// The fields of a checkpoint for the moments, under PyTorch's names.
const (
	fieldM = "exp_avg"
	fieldV = "exp_avg_sq"
)

// loadState sets this rank's shard of the model: the frozen weights, and the state of a checkpoint or new weights.
func (t *Trainer) loadState(ctx context.Context, o *Options) error {
	from, err := NewInitial(t.cfg, t.from != "")
	if err != nil {
		return err
	}
	defer from.Close()
	var identify errgroup.Group // beside the reads of the same files
	if t.mesh.world.Rank() == 0 {
		identify.Go(func() (err error) { t.base, err = from.identify(ctx); return err })
	}
	frozen := o.timed("frozen weights")
	err = t.fillBase(ctx, from.Read, from.drawn)
	frozen()
	if err = cmp.Or(err, identify.Wait()); err != nil {
		return err
	}
	if t.from != "" {
		return t.restore(ctx, t.from)
	}
	return t.fill(ctx, t.share.Masters, from.Read, from.drawn)
}

// A source32 sets dst to the elements of a parameter from offset. Several goroutines call it.
type source32 func(p model.Param, offset int64, dst []float32) error

// fill sets this rank's shard of a flat buffer. drawn reports which parameters are random numbers; nil: none.
func (t *Trainer) fill(ctx context.Context, v View, from source32, drawn drawn) error {
	for b := range t.share.Flat.Buckets {
		part, held := t.share.Held(v, b), t.share.HeldRange(b)
		if !t.share.Sharded() && !t.share.OnHost {
			part, held = t.divide(b, part, held)
		}
		if err := t.fillBucket(ctx, t.share.Flat.Params, part, held, from, drawn); err != nil {
			return err
		}
	}
	return nil
}

// divide returns this rank's part of a bucket's range that every rank of its group holds. gather then copies the
// others' parts, which takes less time than to draw or read them again. Between hosts it might take more, so their
// ranks set everything.
func (t *Trainer) divide(bucket int, v View, held model.Range) (View, model.Range) {
	g := t.share.Group(bucket)
	if g.Size == 1 || t.dev.Machine.Hosts > 1 {
		return v, held
	}
	lo, n := g.Rank*v.Size()/g.Size, v.Size()/g.Size
	part := state.Part(v, lo, lo+n)
	t.divides = append(t.divides, divided{bucket, v, part})
	return part, model.Range{Lo: held.Lo + int64(lo), Hi: held.Lo + int64(lo+n)}
}

// A divided is a bucket's range that the ranks of its group set together, and this rank's part of it.
type divided struct {
	bucket    int
	all, part View
}

// gather completes the ranges of divide.
func (t *Trainer) gather() error {
	for _, d := range t.divides {
		p, err := t.share.groups[d.bucket].AllGather(d.all, d.part)
		if err != nil {
			return fmt.Errorf("gathering the first weights: %w", err)
		}
		p.Wait()
	}
	t.divides = nil
	if base, group := t.share.Base, t.share.groups[0]; base != nil && group.Size() > 1 && base.Flat.FactorsSize() > 0 {
		p, err := group.AllReduce(base.Factors, comm.Max) // each rank has set some, and the others are 0
		if err != nil {
			return fmt.Errorf("gathering the factors of frozen weights: %w", err)
		}
		p.Wait()
	}
	return nil
}

// A drawn reports whether the first values of a parameter are random numbers, and which.
type drawn func(p model.Param) (kernels.Normals, bool)

// fillBucket sets v to a range of the flat space, with zeros between parameters. The device draws what it can.
func (t *Trainer) fillBucket(ctx context.Context, params []model.Param, v View, held model.Range, from source32,
	drawn drawn) error {
	lo := held.Lo // of what is not set yet
	rest := func(hi int64) error {
		return t.fillRange(ctx, params, state.Part(v, int(lo-held.Lo), int(hi-held.Lo)), model.Range{Lo: lo, Hi: hi}, from)
	}
	if drawn != nil && t.dev.Draw != nil && !t.stage.direct {
		for _, p := range params {
			first, last := max(p.Offset, held.Lo), min(p.Offset+int64(p.Size()), held.Hi)
			numbers, ok := drawn(p)
			if !ok || first >= last {
				continue
			}
			if err := rest(first); err != nil {
				return err
			}
			t.dev.Draw(state.Part(v, int(first-held.Lo), int(last-held.Lo)), first-p.Offset, numbers)
			lo = last
		}
	}
	return rest(held.Hi)
}

// fillRange does it from the host.
func (t *Trainer) fillRange(ctx context.Context, params []model.Param, v View, held model.Range,
	from source32) error {
	return t.stage.write(ctx, v, func(lo int, data []float32) error {
		from64, to := held.Lo+int64(lo), held.Lo+int64(lo+len(data))
		at := sort.Search(len(params), func(i int) bool { return params[i].Offset+int64(params[i].Size()) > from64 })
		set := from64 // end of the filled part
		for i := at; i < len(params) && params[i].Offset < to; i++ {
			p := params[i]
			first, last := max(p.Offset, from64), min(p.Offset+int64(p.Size()), to)
			clear(data[set-from64 : first-from64])
			set = last
			if err := from(p, first-p.Offset, data[first-from64:last-from64]); err != nil {
				return err
			}
		}
		clear(data[set-from64:])
		return nil
	})
}

// CheckpointParams converts a layout to the parameters of a checkpoint.
func CheckpointParams(params []model.Param) []checkpoint.Param {
	out := make([]checkpoint.Param, len(params))
	for i, p := range params {
		out[i] = checkpoint.Param{Name: p.Name, Shape: p.Shape, Offset: p.Offset}
	}
	return out
}

// restore reads this rank's shard of a checkpoint.
func (t *Trainer) restore(ctx context.Context, dir string) error {
	c, err := checkpoint.OpenWait(ctx, dir)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Fits(CheckpointParams(t.share.Flat.Params)); err != nil {
		return err
	}
	if t.base != nil {
		if err := t.base.matches(c); err != nil {
			return err
		}
	}
	var reading sync.Mutex
	for _, f := range t.fields() {
		err := t.fill(ctx, f.view, func(p model.Param, offset int64, dst []float32) error {
			reading.Lock()
			defer reading.Unlock()
			return c.Read(ctx, p.Name, f.name, offset, dst)
		}, nil)
		if err != nil {
			return err
		}
	}
	if t.share.M.IsZero() {
		return nil
	}
	t.step, t.consumed, t.tokens = int(c.Manifest.Step), c.Manifest.Samples, c.Manifest.Tokens
	if text, ok := c.Manifest.Extra[blankState]; ok {
		if err := json.Unmarshal(text, &t.blank); err != nil || t.blank < 0 || t.blank > t.step {
			return fmt.Errorf("%s in the checkpoint's manifest: %s is no count of %d steps", blankState, text, t.step)
		}
	}
	if err := t.stop.restore(c.Manifest.Extra); err != nil {
		return err
	}
	return t.scaler.restore(c.Manifest.Extra, t.step)
}

// DataState names the record of the data in a checkpoint, a data.Identity.
const DataState = "data"

// blankState names the checkpoint's count of steps without targets.
const blankState = "blank_steps"

// A field is a flat buffer with its name in checkpoints.
type field struct {
	name string
	view View
}

func (t *Trainer) fields() []field {
	if t.share.M.IsZero() { // frozen
		return []field{{checkpoint.FieldParam, t.share.Masters}}
	}
	return []field{{checkpoint.FieldParam, t.share.Masters}, {fieldM, t.share.M}, {fieldV, t.share.V}}
}

// fromRank0 returns the result of rank 0's call of read to every rank. The others wait for its disk.
func (t *Trainer) fromRank0(ctx context.Context, read func(context.Context) ([]byte, error)) (text []byte, err error) {
	group := t.mesh.saves
	err = checkpoint.OnAllRanks(ctx, group, beat(t.cfg), 0, func() (err error) {
		if group.Rank() == 0 {
			text, err = read(ctx)
		}
		return err
	})
	if err == nil {
		text, err = checkpoint.Broadcast(ctx, group, 0, text)
	}
	return text, err
}

// newest names the checkpoint to resume from: the newest complete one of the run itself, or From. It reads every shard.
func (o *Options) newest(ctx context.Context) ([]byte, error) {
	if o.Resume {
		c, reasons, err := checkpoint.Latest(ctx, o.checkpoints())
		for _, r := range reasons {
			o.notice("checkpoint passed over: " + r)
		}
		if err == nil {
			defer c.Close()
			return []byte(c.Dir), nil
		}
		if !errors.Is(err, checkpoint.ErrNone) { // a new start would overwrite damaged checkpoints
			return nil, err
		}
	}
	return []byte(o.From), nil
}

// snapshot returns this rank's part of each bucket: a copy in t.copies, which the next snapshot reuses, or without copy
// functions that read it in pieces. No step may be queued, without copy until the save has ended.
func (t *Trainer) snapshot(ctx context.Context, o *Options, copies bool) (checkpoint.Snapshot, error) {
	p := t.cfg.Parallel
	extra := map[string]json.RawMessage{}
	scales := t.scaler.save()
	for _, x := range []struct {
		name  string
		has   bool
		value any
	}{
		{scalerState, scales != nil, scales}, {baseState, t.base != nil, t.base}, {blankState, t.blank > 0, t.blank},
		{DataState, o.Data != nil, o.Data}, {earlyStopState, t.stop != (earlyStop{}), t.stop},
	} {
		var err error
		if !x.has {
			continue
		}
		if extra[x.name], err = json.Marshal(x.value); err != nil {
			return checkpoint.Snapshot{}, fmt.Errorf("%s: %w", x.name, err)
		}
	}
	s := checkpoint.Snapshot{
		Meta: checkpoint.Meta{
			Step: int64(t.step), Samples: t.consumed, Tokens: t.tokens,
			World: checkpoint.World{Size: t.mesh.world.Size(), Context: p.Context, Data: p.Data, Algorithm: p.Algorithm,
				Layout: string(p.Layout)},
			Config: o.ConfigYAML, CPRunVersion: o.Version,
			Seeds: map[string]int64{"train": t.cfg.Train.Seed, "data": t.cfg.Data.Seed},
			Extra: extra,
		},
		Params: CheckpointParams(t.share.Flat.Params),
	}
	for b, bucket := range t.share.Flat.Buckets {
		if bucket.Size() > 0 {
			s.Ranges = append(s.Ranges, checkpoint.Range(t.share.Share(b)))
		}
	}
	fields := t.fields()
	t.share.flush() // wait for weights in transfer
	if t.share.OnHost {
		if err := t.dev.Stream.Sync(ctx); err != nil {
			return s, err
		}
	}
	read := func(ctx context.Context, field int, lo int64, dst []float32) error {
		return t.readOwned(ctx, fields[field].view, lo, dst)
	}
	for i, f := range fields {
		s.Fields = append(s.Fields, checkpoint.Field{Name: f.name})
		if copies {
			s.Fields[i].Data = t.copies[i]
			if err := read(ctx, i, 0, t.copies[i]); err != nil {
				return s, err
			}
		}
	}
	if !copies {
		s.Read = read
	}
	return s, nil
}

// readOwned sets dst to this rank's elements of a field from lo.
func (t *Trainer) readOwned(ctx context.Context, field View, lo int64, dst []float32) error {
	for b, at := range t.share.Owned() {
		first, last := max(lo, at.Lo), min(lo+int64(len(dst)), at.Hi)
		if first >= last {
			continue
		}
		part := state.Part(t.share.Own(field, b), int(first-at.Lo), int(last-at.Lo))
		if err := t.stage.read(ctx, dst[first-lo:last-lo], part); err != nil {
			return err
		}
	}
	return nil
}
