package worker

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/tensor"
)

func (p *process) bench(ctx context.Context) error {
	var task bench.Task
	if err := p.payload(&task); err != nil {
		return err
	}
	o, err := benchDevice(&task, p.WorldSize, p.Rank)
	if err != nil {
		return err
	}
	dev, world, err := p.device(ctx, o)
	if err != nil {
		return err
	}
	p.where.enter("benchmark")
	r := &bench.Rank{Device: dev, World: world, Control: world}
	if task.Comm != nil || task.Calibrate != nil && p.WorldSize > 1 && task.Calibrate.Operations {
		if r.Transports, err = p.transports(ctx, r); err != nil {
			return err
		}
	}
	if peak, ok := machine.CardFor(task.Machine.Arch); ok {
		r.LinkGBps = peak.Link / 1e9
	}
	return r.Run(ctx, &task, func(row bench.Row) error {
		if p.Rank > 0 {
			return nil
		}
		return p.SendData(job.EventBench, 0, row)
	})
}

func benchDevice(task *bench.Task, ranks, rank int) (o device.CUDAOptions, err error) {
	cpu := task.Machine.IsCPU()
	o = device.CUDAOptions{Machine: task.Machine, Backend: backends.Reference.String(),
		Compute: tensor.BF16} // loads fastest
	switch {
	case task.Attention != nil:
		s := task.Attention
		o.Packed, o.Backend, o.Deterministic = s.Documents != "", s.Backend, s.Deterministic
		if o.Compute, err = bench.DType(s.DType, cpu); err == nil && s.Backend == backends.Fused.String() {
			_, o.Workspace, err = s.Demand(ranks, rank, task.Machine)
		}
	case task.Calibrate != nil:
		s := task.Calibrate
		o.Backend, o.Workspace = s.Backend, s.Workspace()
		o.Compute, err = bench.DType(s.DType, cpu)
	case task.Ops != nil:
		o.Compute, err = bench.DType(task.Ops.DType, cpu)
	}
	return o, err
}

// transports returns the transports between the ranks.
func (p *process) transports(ctx context.Context, r *bench.Rank) ([]bench.Transport, error) {
	if t, err := p.gpuTransports(ctx, r); err != nil || len(t) > 0 {
		return t, err
	}
	tcp, err := p.tcp(ctx)
	if err != nil {
		return nil, err
	}
	p.closing(tcp.Close)
	return []bench.Transport{{Name: "unix", Comm: p.world}, {Name: "tcp", Comm: tcp}}, nil
}

// tcp connects the ranks a second time, over TCP on the loopback interface, like ranks of several nodes.
func (p *process) tcp(ctx context.Context) (*comm.Group, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("mesh: %w", err)
	}
	ports := tensor.New(tensor.I64, p.WorldSize)
	tensor.Data[int64](ports)[p.Rank] = int64(listener.Addr().(*net.TCPAddr).Port)
	err = comm.Finish(ctx)(p.world.AllGather(ports, ports.Slice(tensor.Dim, p.Rank, p.Rank+1)))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mesh: ports of all ranks: %w", err), listener.Close())
	}
	addrs := make([]string, p.WorldSize)
	for i, port := range tensor.Data[int64](ports) {
		addrs[i] = fmt.Sprintf("127.0.0.1:%d", port)
	}
	return comm.Connect(ctx, comm.Mesh{
		Listener: listener, Addrs: addrs, Rank: p.Rank, Size: p.WorldSize, Secret: p.Secret, RunID: p.RunID,
	}, p.stream, comm.Options{Deadline: config.Deadline})
}
