// A prefill worker and a decode worker in Go, over gRPC alone: their KV caches lie in the daemons' memory.
//
//	roundtrip PREFILL_WORKER_SOCKET DECODE_WORKER_SOCKET DECODE_PEER_HOST:PORT
//
// How it is built: README.md. The addresses that scripts/demo --keep prints serve.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand"
	"os"
	"sort"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "spectrumkv/v1"
)

// The model: float16, one K and one V of [block, token, head, dim] per layer.
const (
	layers, heads, headDim = 3, 2, 64
	blockTokens, blocks    = 16, 12
	tokens                 = 40
	blockBytes             = blockTokens * heads * headDim * 2
	tensorBytes            = blocks * blockBytes
)

// codec codes messages with the Protobuf library that made them. Only for a gRPC before 1.35, as Debian 12 has it, whose
// own codec knows no messages of that library.
type codec struct{}

func (codec) Marshal(message interface{}) ([]byte, error) {
	return proto.Marshal(message.(proto.Message))
}
func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, message.(proto.Message))
}
func (codec) Name() string { return "proto" }

// worker is a connection to a daemon, and a pool there that a stream of pings holds.
type worker struct {
	calls   pb.WorkerServiceClient
	pool    *pb.PoolRef
	letGo   context.CancelFunc
	timeout time.Duration
}

// schema says where each tensor lies: K and V of layer 0, of layer 1, ... one after the other.
func schema() *pb.PoolSchema {
	group := &pb.LayerGroup{Kind: pb.GroupKind_GROUP_KIND_ATTENTION, DataType: pb.DataType_DATA_TYPE_FLOAT16,
		HeadsTotal: heads, HeadCount: heads, HeadDim: headDim, BlockTokens: blockTokens, NumBlocks: blocks}
	tensor := func(index uint64) *pb.TensorView {
		return &pb.TensorView{OffsetBytes: index * tensorBytes, BlockStrideBytes: blockBytes,
			TokenStrideBytes: heads * headDim * 2, HeadStrideBytes: headDim * 2, DimStrideBytes: 2}
	}
	for layer := uint32(0); layer < layers; layer++ {
		group.Layers = append(group.Layers, &pb.LayerTensors{Layer: layer,
			K: tensor(uint64(2 * layer)), V: tensor(uint64(2*layer + 1))})
	}
	memory := &pb.MemorySegment{Kind: &pb.MemorySegment_DaemonOwned{
		DaemonOwned: &pb.DaemonOwnedSegment{SizeBytes: layers * 2 * tensorBytes}}}
	return &pb.PoolSchema{Model: "example", TensorParallelSize: 1, Groups: []*pb.LayerGroup{group},
		Segments: []*pb.MemorySegment{memory}}
}

// start connects, registers a pool and holds it. The daemon lets go of the pool as soon as the stream breaks.
func start(socket, requestID string) (*worker, error) {
	connection, err := grpc.Dial("unix:"+socket, grpc.WithInsecure(), grpc.WithBlock(), grpc.WithTimeout(10*time.Second),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(codec{})))
	if err != nil {
		return nil, fmt.Errorf("no daemon answers at %s: %w", socket, err)
	}
	w := &worker{calls: pb.NewWorkerServiceClient(connection), timeout: 30 * time.Second}
	answer, err := w.calls.RegisterPool(w.context(), &pb.RegisterPoolRequest{RequestId: requestID, Schema: schema()})
	if err != nil {
		return nil, err
	}
	w.pool = answer.Pool
	holding, letGo := context.WithCancel(context.Background())
	w.letGo = letGo
	hold, err := w.calls.HoldPool(holding)
	if err != nil {
		return nil, err
	}
	go func() { // a ping every third of the lease, until letGo
		for hold.Send(&pb.HoldPoolRequest{Pool: w.pool}) == nil {
			select {
			case <-holding.Done():
				return
			case <-time.After(time.Duration(answer.LeaseTtlMs) * time.Millisecond / 3):
			}
		}
	}()
	return w, nil
}

func (w *worker) context() context.Context {
	limited, _ := context.WithTimeout(context.Background(), w.timeout) //nolint:govet // ends by itself
	return limited
}

func (w *worker) stop() error {
	_, err := w.calls.UnregisterPool(w.context(), &pb.UnregisterPoolRequest{Pool: w.pool})
	w.letGo()
	return err
}

// key names a tensor's block in the order of tokens.
type key struct {
	layer uint32
	plane pb.Plane
	place int
}

// put writes each block at the place it has in the request's block table.
func (w *worker) put(table []uint64, cache map[key][]byte) error {
	stream, err := w.calls.PutBlocks(w.context())
	if err != nil {
		return err
	}
	pool := w.pool // in the first message
	for at, data := range cache {
		block := &pb.BlockData{Layer: at.layer, Plane: at.plane, Block: table[at.place], Data: data}
		if err := stream.Send(&pb.PutBlocksRequest{Pool: pool, Blocks: []*pb.BlockData{block}}); err == io.EOF {
			break // CloseAndRecv says why
		} else if err != nil {
			return err
		}
		pool = nil
	}
	_, err = stream.CloseAndRecv()
	return err
}

// get reads them back.
func (w *worker) get(table []uint64) (map[key][]byte, error) {
	places := map[uint64]int{}
	request := &pb.GetBlocksRequest{Pool: w.pool}
	for place, block := range table {
		places[block] = place
		request.Runs = append(request.Runs, &pb.BlockRun{First: block, Count: 1})
	}
	stream, err := w.calls.GetBlocks(w.context(), request)
	if err != nil {
		return nil, err
	}
	cache := map[key][]byte{}
	for {
		message, err := stream.Recv()
		if err == io.EOF {
			return cache, nil
		} else if err != nil {
			return nil, err
		}
		for _, block := range message.Blocks {
			cache[key{block.Layer, block.Plane, places[block.Block]}] = block.Data
		}
	}
}

// wait watches the transfer to its end.
func (w *worker) wait(id string) (*pb.TransferReport, error) {
	request := &pb.WatchTransferRequest{Transfer: &pb.TransferKey{TransferId: id}}
	stream, err := w.calls.WatchTransfer(w.context(), request)
	if err != nil {
		return nil, err
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if ready := event.GetLayersReady(); ready != nil {
			fmt.Printf("layers ready: %d\n", ready.Layers)
		}
		if report := event.GetTerminal(); report != nil {
			if report.State != pb.TransferState_TRANSFER_STATE_COMMITTED {
				return nil, fmt.Errorf("%v %s: %s", report.State, report.Reason, report.Message)
			}
			return report, nil
		}
	}
}

// tokensOf cuts what no token of the request has off the last block: the destination's is zero there.
func tokensOf(place int, data []byte) []byte {
	if rest := tokens - place*blockTokens; rest < blockTokens {
		return data[:rest*heads*headDim*2]
	}
	return data
}

func roundTrip(prefill, decode *worker, peer string) error {
	id := fmt.Sprintf("go-%d", os.Getpid())
	source, destination := []uint64{7, 2, 9}, []uint64{0, 5, 3} // block tables, in the order of tokens
	cache := map[key][]byte{}
	for layer := uint32(0); layer < layers; layer++ {
		for _, plane := range []pb.Plane{pb.Plane_PLANE_K, pb.Plane_PLANE_V} {
			for place := range source {
				data := make([]byte, blockBytes)
				rand.Read(data) // any bits: RAW carries them as they are
				cache[key{layer, plane, place}] = data
			}
		}
	}
	if err := prefill.put(source, cache); err != nil {
		return err
	}
	runs := func(table []uint64) []*pb.GroupBlocks {
		group := &pb.GroupBlocks{}
		for _, block := range table {
			group.Runs = append(group.Runs, &pb.BlockRun{First: block, Count: 1})
		}
		return []*pb.GroupBlocks{group}
	}
	_, err := decode.calls.Expect(decode.context(), &pb.ExpectRequest{TransferId: id, Pool: decode.pool,
		TokenCount: tokens, Blocks: runs(destination)})
	if err != nil {
		return err
	}
	_, err = prefill.calls.Send(prefill.context(), &pb.SendRequest{TransferId: id, Peer: peer, Pool: prefill.pool,
		TokenCount: tokens, Blocks: runs(source), Policy: &pb.Policy{Allocator: pb.Allocator_ALLOCATOR_RAW}})
	if err != nil {
		return err
	}
	report, err := decode.wait(id)
	if err != nil {
		return err
	}
	fmt.Printf("committed: %d KV bytes, %d on the wire\n", report.KvBytes, report.WireBytes)
	landed, err := decode.get(destination)
	if err != nil {
		return err
	}
	if len(landed) != len(cache) {
		return fmt.Errorf("%d blocks came back, not %d", len(landed), len(cache))
	}
	for at, data := range cache {
		if !bytes.Equal(tokensOf(at.place, landed[at]), tokensOf(at.place, data)) {
			return fmt.Errorf("layer %d, %v, block %d differs", at.layer, at.plane, at.place)
		}
	}
	fmt.Println("every value arrived")
	return nil
}

// explain gives code, reason and offending values of an error of the daemon.
func explain(err error) string {
	failed, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	words := strings.ToUpper(snake(failed.Code()))
	for _, detail := range failed.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			words += " " + info.Reason
			names := []string{}
			for name := range info.Metadata {
				names = append(names, name)
			}
			sort.Strings(names)
			for _, name := range names {
				words += fmt.Sprintf(" %s=%s", name, info.Metadata[name])
			}
		}
	}
	return words + ": " + failed.Message()
}

// snake turns NotFound into Not_Found.
func snake(code codes.Code) string {
	words := ""
	for i, letter := range code.String() {
		if i > 0 && letter >= 'A' && letter <= 'Z' {
			words += "_"
		}
		words += string(letter)
	}
	return words
}

func run(prefillSocket, decodeSocket, peer string) error {
	id := fmt.Sprintf("go-%d-", os.Getpid())
	prefill, err := start(prefillSocket, id+"prefill")
	if err != nil {
		return err
	}
	decode, err := start(decodeSocket, id+"decode")
	if err != nil {
		return err
	}
	if err := roundTrip(prefill, decode, peer); err != nil {
		return err
	}
	unknown := &pb.GetTransferRequest{Transfer: &pb.TransferKey{TransferId: "nobody"}}
	if _, err := decode.calls.GetTransfer(decode.context(), unknown); err != nil {
		fmt.Println("refused:", explain(err))
	}
	if err := prefill.stop(); err != nil {
		return err
	}
	return decode.stop()
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: roundtrip PREFILL_WORKER_SOCKET DECODE_WORKER_SOCKET DECODE_PEER_HOST:PORT")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "roundtrip:", explain(err))
		os.Exit(1)
	}
}
