package train_test

import (
	"context"
	"errors"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// A staged is a group of ranks without a library, such as two that share a GPU. Exchanges use the result of join, as in
// a run. Collectives on device memory go through the host, which waits for them.
type staged struct {
	*comm.Group // group of the hosts
	dev         *device.Device
	join        joiner
	moves       comm.Exchanger
	parts       []*staged
}

// A joiner connects the devices of a group's ranks.
type joiner func(ctx context.Context, host *comm.Group) (comm.Exchanger, error)

var (
	_ comm.Communicator = (*staged)(nil)
	_ comm.Hosted       = (*staged)(nil)
)

func newStaged(ctx context.Context, host *comm.Group, dev *device.Device, join joiner) (*staged, error) {
	moves, err := join(ctx, host)
	return &staged{Group: host, dev: dev, join: join, moves: moves}, err
}

func (g *staged) Host() *comm.Group { return g.Group }

func (g *staged) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	return g.moves.Exchange(send, recv)
}

func (g *staged) Split(ctx context.Context, colour, key int) (comm.Communicator, error) {
	host, err := g.Subgroup(ctx, colour, key, nil)
	if err != nil {
		return nil, err
	}
	part, err := newStaged(ctx, host, g.dev, g.join)
	if err != nil {
		return nil, err
	}
	g.parts = append(g.parts, part)
	return part, nil
}

func (g *staged) AllReduce(v tensor.View, op comm.Op) (comm.Pending, error) {
	return g.via(v, v, func(dst, src tensor.View) (comm.Pending, error) {
		tensor.Copy(dst, src)
		return g.Group.AllReduce(dst, op)
	})
}

func (g *staged) ReduceScatter(dst, src tensor.View, op comm.Op) (comm.Pending, error) {
	return g.via(dst, src, func(dst, src tensor.View) (comm.Pending,
		error) {
		return g.Group.ReduceScatter(dst, src, op)
	})
}

func (g *staged) AllGather(dst, src tensor.View) (comm.Pending, error) {
	return g.via(dst, src, g.Group.AllGather)
}

// via makes a call on copies in host memory.
func (g *staged) via(dst, src tensor.View, call func(dst, src tensor.View) (comm.Pending, error)) (comm.Pending,
	error) {
	ctx := context.Background()
	in, err := g.dev.HostVector("in", src.DType(), src.Size())
	if err != nil {
		return nil, err
	}
	defer g.dev.FreeHostVector(in)
	out, err := g.dev.HostVector("out", dst.DType(), dst.Size())
	if err != nil {
		return nil, err
	}
	defer g.dev.FreeHostVector(out)
	g.dev.Store.Download(in, src.Reshape(in.Shape()))
	if err := g.dev.Stream.Sync(ctx); err != nil {
		return nil, err
	}
	p, err := call(out, in)
	if err == nil {
		err = p.Sync(ctx)
	}
	if err != nil {
		return nil, err
	}
	g.dev.Store.Upload(dst.Reshape(out.Shape()), out)
	return ended{}, g.dev.Stream.Sync(ctx)
}

// An ended is a finished call.
type ended struct{}

func (ended) Wait()                      {}
func (ended) Sync(context.Context) error { return nil }

func (g *staged) Close() (err error) {
	for _, p := range g.parts {
		err = errors.Join(err, p.Close())
	}
	if c, ok := g.moves.(interface{ Close() error }); ok {
		err = errors.Join(err, c.Close())
	}
	return errors.Join(err, g.Group.Close())
}

// Ranks whose collectives go through the host train like others, so that tests on a shared GPU are valid.
func TestStagedGroupsTrain(t *testing.T) {
	t.Parallel()
	const ranks = 2
	for shard, algorithm := range map[string]string{"none": "ulysses", "optimizer": "ring", "gradients": "ulysses"} {
		set := []string{"memory.shard=" + shard, "parallel.algorithm=" + algorithm,
			"model.layer_types=[full_attention, sliding_attention]", "model.sliding_window=10"}
		want := curve(t, tiny, ranks, set...)
		got, err := runJoined(t, load(t, tiny, ranks, set...), ranks, train.Options{}, func(*device.Device) {},
			func(host *comm.Group, dev *device.Device) (comm.Communicator, error) {
				return newStaged(t.Context(), host, dev, func(ctx context.Context, host *comm.Group) (comm.Exchanger,
					error) {
					return host.Subgroup(ctx, 0, host.Rank(), dev.Stream)
				})
			})
		if err != nil {
			t.Fatal(err)
		}
		closeTo(t, "shard "+shard, got.steps, want, 1e-6)
	}
}
