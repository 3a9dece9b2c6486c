// SPDX-License-Identifier: Apache-2.0
#ifdef AIODATADIST_VERBS
#include "verbs_endpoint.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace adt {
namespace {

constexpr uint32_t kQueuePairNumbers = 1U << 24;
constexpr size_t kPiecesAtOnce = 1024;
constexpr uint64_t kMaxMessage = uint64_t{1} << 30;
constexpr uint8_t kMaxReads = 16;
constexpr uint8_t kHops = 64;
constexpr uint8_t kNotReadyTimer = 12;     // 0.64 ms; nobody sends what needs a receive request
constexpr uint8_t kNotReadyRetries = 7;    // without end
constexpr int32_t kMostSkipped = 1 << 20;  // generations

uint32_t random_psn() {
    uint32_t value = 0;
    [[maybe_unused]] const ssize_t got = getrandom(&value, sizeof(value), 0);
    return value % kQueuePairNumbers;
}

// adt_message_t::c of an offer.
struct VerbsAddress {
    uint32_t number;  // of the queue pair
    uint32_t psn;
    uint8_t mtu;
    uint8_t reads;  // that its device serves at a time

    uint64_t packed() const {
        return uint64_t{number} | uint64_t{psn} << 24 | uint64_t{mtu} << 48 | uint64_t{reads} << 56;
    }
    static VerbsAddress of(uint64_t c) {
        return {static_cast<uint32_t>(c % kQueuePairNumbers), static_cast<uint32_t>((c >> 24) % kQueuePairNumbers),
                static_cast<uint8_t>(c >> 48), static_cast<uint8_t>(c >> 56)};
    }
};

adt_message_t message(VerbsSay kind, int32_t number) {
    adt_message_t made{};
    made.kind = static_cast<uint8_t>(kind);
    made.number = number;
    return made;
}

uint8_t least_reads(int most) {
    return static_cast<uint8_t>(std::clamp(most, 1, static_cast<int>(kMaxReads)));
}

}  // namespace

size_t VerbsDone::take(adt_completion_t *out, size_t capacity) {
    const std::lock_guard<std::mutex> lock(mu_);
    const size_t n = std::min(capacity, done_.size());
    std::copy_n(done_.begin(), n, out);
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(n));
    return n;
}

VerbsEndpoint::VerbsEndpoint(uint64_t number, void *name, const adt_rdma_t &rdma, VerbsDone &done)
    : id(number), link(name), device_name(rdma.device), rdma_(rdma), done_(done) {}

VerbsEndpoint::~VerbsEndpoint() = default;

// ---------------------------------------------------------------------------------------- queue pairs, one generation

void VerbsEndpoint::start(const std::shared_ptr<RegisteredDevice> &device, uint8_t port, News &news) {
    const std::lock_guard<std::mutex> control(control_);
    if (closed()) return;
    device_ = device;
    port_ = port;
    VerbsDevice &d = device_->device;
    if (const int code = d.lib.query_port(d.context, port_, &port_attr_); code != 0) {
        give_up("ibv_query_port: " + errno_text(code), news);
        return;
    }
    if (const int code = d.lib.query_gid(d.context, port_, rdma_.gid_index, &gid_); code != 0) {
        give_up("ibv_query_gid " + std::to_string(rdma_.gid_index) + ": " + errno_text(code > 0 ? code : errno), news);
        return;
    }
    max_sge_ = d.max_sge();
    const uint64_t test = verbs_limits().message_bytes.load(std::memory_order_relaxed);
    max_message_ = std::min<uint64_t>(port_attr_.max_msg_sz == 0 ? kMaxMessage : port_attr_.max_msg_sz, kMaxMessage);
    if (test != 0) max_message_ = std::min(max_message_, test);
    begin_generation(1, news);
}

void VerbsEndpoint::fail(const std::string &reason, News &news) {
    const std::lock_guard<std::mutex> control(control_);
    if (!closed()) give_up(reason, news);
}

// Makes the queue pair of a generation and offers it to the peer. The peer must hear of what is refused first: with
// the offer it may post again.
void VerbsEndpoint::begin_generation(int32_t generation, News &news) {
    generation_ = generation;
    news.messages.insert(news.messages.end(), refusals_.begin(), refusals_.end());
    refusals_.clear();
    if (generation > 1) verbs_stats().rebuilds.fetch_add(1, std::memory_order_relaxed);
    if (!make_queue_pair(news)) return;
    psn_ = random_psn();
    adt_message_t offer = message(VerbsSay::offer, generation_);
    offer.small = port_attr_.lid;
    std::memcpy(&offer.a, gid_.raw, 8);
    std::memcpy(&offer.b, gid_.raw + 8, 8);
    offer.c = VerbsAddress{qp_->qp_num, psn_, static_cast<uint8_t>(port_attr_.active_mtu),
                           least_reads(device_->device.attr.max_qp_rd_atom)}
                  .packed();
    news.messages.push_back(offer);
}

bool VerbsEndpoint::make_queue_pair(News &news) {
    VerbsDevice &d = device_->device;
    uint32_t requests = d.max_requests();
    ibv_cq *cq = cq_;
    if (cq == nullptr) {
        // Named by its number: an event may be read after the endpoint is gone.
        void *const context = reinterpret_cast<void *>(static_cast<uintptr_t>(id));
        cq = d.lib.create_cq(d.context, static_cast<int>(requests) + 1, context, d.channel, 0);
        if (cq == nullptr) {
            give_up("ibv_create_cq on " + d.name + ": " + errno_text(errno), news);
            return false;
        }
        ibv_req_notify_cq(cq, 0);
        const std::lock_guard<std::mutex> lock(mu_);
        cq_ = cq;
    }
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap.max_recv_wr = 1;
    init.cap.max_recv_sge = 1;
    init.cap.max_send_sge = max_sge_;
    init.qp_type = IBV_QPT_RC;
    ibv_qp *qp = nullptr;
    // Some devices promise more requests than they have room for, with so many pieces each.
    for (; requests >= 2 && qp == nullptr; requests /= 2) {
        init.cap.max_send_wr = requests;
        most_credits_ = requests;
        qp = d.lib.create_qp(d.pd, &init);
        if (qp == nullptr && errno != ENOMEM && errno != EINVAL) break;
    }
    if (qp == nullptr) {
        give_up("ibv_create_qp on " + d.name + ": " + errno_text(errno), news);
        return false;
    }
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = port_;
    attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    const int code = d.lib.modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    verbs_stats().queue_pairs.fetch_add(1, std::memory_order_relaxed);
    {
        const std::lock_guard<std::mutex> lock(mu_);
        qp_ = qp;
        state_ = State::offered;
        credits_ = most_credits_;
        rebuild_due_ = false;
    }
    if (code != 0) {
        give_up("ibv_modify_qp to INIT: " + errno_text(code), news);
        return false;
    }
    return true;
}

bool VerbsEndpoint::connect_queue_pair(const adt_message_t &offer, News &news) {
    VerbsDevice &d = device_->device;
    const VerbsAddress peer = VerbsAddress::of(offer.c);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = std::min(port_attr_.active_mtu, static_cast<ibv_mtu>(std::clamp<int>(peer.mtu, 1, 5)));
    attr.dest_qp_num = peer.number;
    attr.rq_psn = peer.psn;
    attr.max_dest_rd_atomic = least_reads(d.attr.max_qp_rd_atom);
    attr.min_rnr_timer = kNotReadyTimer;
    attr.ah_attr.port_num = port_;
    attr.ah_attr.sl = rdma_.service_level;
    attr.ah_attr.dlid = offer.small;
    if (port_attr_.link_layer == IBV_LINK_LAYER_ETHERNET) {
        attr.ah_attr.is_global = 1;
        std::memcpy(attr.ah_attr.grh.dgid.raw, &offer.a, 8);
        std::memcpy(attr.ah_attr.grh.dgid.raw + 8, &offer.b, 8);
        attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(rdma_.gid_index);
        attr.ah_attr.grh.hop_limit = kHops;
        attr.ah_attr.grh.traffic_class = rdma_.traffic_class;
    }
    int code = d.lib.modify_qp(qp_, &attr,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (code != 0) {
        give_up("the peer's address cannot be reached (ibv_modify_qp to RTR: " + errno_text(code) + ")", news);
        return false;
    }
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = rdma_.timeout;
    attr.retry_cnt = rdma_.retry_count;
    attr.rnr_retry = kNotReadyRetries;
    attr.sq_psn = psn_;
    attr.max_rd_atomic = std::min(least_reads(d.attr.max_qp_init_rd_atom), least_reads(peer.reads));
    code = d.lib.modify_qp(
        qp_, &attr,
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    if (code != 0) give_up("ibv_modify_qp to RTS: " + errno_text(code), news);
    return code == 0;
}

// Only this is a promise that nothing is under way any more, in either direction. False: the device has not let go.
bool VerbsEndpoint::destroy(ibv_qp *qp, News &news) {
    const auto number = qp->qp_num;
    std::atomic<uint32_t> &faults = verbs_limits().stuck_queue_pairs;
    const bool fault = faults.load(std::memory_order_relaxed) > 0;
    if (fault) faults.fetch_sub(1, std::memory_order_relaxed);
    const int code = fault ? EBUSY : device_->device.lib.destroy_qp(qp);
    // A device that was taken away has ended all its queue pairs.
    if (code == 0 || code == EIO || code == ENODEV) return true;
    news.error = "ibv_destroy_qp of " + std::to_string(number) + " on " + device_name + ": " + errno_text(code);
    return false;
}

// Takes the queue pair off local memory, whoever uses it. What is posted will be posted again, unless it was given up,
// has failed or is refused: that leaves this side's memory here, and the peer's when its next offer is heard. False:
// the device may still touch memory, so nothing has been completed, and the caller has to come again.
bool VerbsEndpoint::end_queue_pair(News &news) {
    ibv_qp *qp = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        if (state_ != State::failed) state_ = State::down;
        qp = qp_;
    }
    if (qp != nullptr) {
        VerbsDevice &d = device_->device;
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_ERR;
        d.lib.modify_qp(qp, &attr, IBV_QP_STATE);
        take_completions(news);
        if (!destroy(qp, news)) {
            news.stuck = true;
            return false;
        }
        verbs_stats().queue_pairs.fetch_sub(1, std::memory_order_relaxed);
        take_completions(news);
    }
    const std::lock_guard<std::mutex> lock(mu_);
    qp_ = nullptr;
    groups_.clear();
    credits_ = 0;
    next_ = 0;
    std::deque<std::unique_ptr<Work>> kept;
    for (std::unique_ptr<Work> &work : works_) {
        work->stale = work->stale || work->groups > 0;
        work->groups = 0;
        work->chunk = 0;
        work->at = 0;
        work->ended = false;
        adt_status_t status = work->failure;
        if (status == ADT_OK) status = work->given_up;
        if (status == ADT_OK) status = refusal(*work->batch);
        if (status == ADT_OK) {
            kept.push_back(std::move(work));
        } else if (work->stale) {
            enter(*work, status, 1, news);
            detached_.push_back(std::move(work));
        } else {
            enter(*work, status, 0, news);
        }
    }
    works_.swap(kept);
    return true;
}

// Under `mu_`. The batch belongs to the host again as soon as this is not detached.
void VerbsEndpoint::enter(const Work &work, adt_status_t status, uint32_t detached, News &news) {
    done_.add(work.batch, status, detached);
    news.done = true;
}

// The peer's old queue pair is gone.
void VerbsEndpoint::retire_detached(News &news) {
    const std::lock_guard<std::mutex> lock(mu_);
    for (const std::unique_ptr<Work> &work : detached_) enter(*work, ADT_ERR_ABORTED, 0, news);
    detached_.clear();
    for (const std::unique_ptr<Work> &work : works_) work->stale = false;
}

void VerbsEndpoint::rebuild(News &news) {
    const std::lock_guard<std::mutex> control(control_);
    adt_status_t proof = ADT_OK;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        if (closed() || state_ == State::failed || !rebuild_due_) return;
        proof = proof_status_;
    }
    if (proof != ADT_OK) {
        give_up("nothing arrives at the peer by RDMA: " + verbs_status_words(proof), news);
        return;
    }
    if (end_queue_pair(news)) begin_generation(generation_ + 1, news);
}

void VerbsEndpoint::go_up(News &news) {
    const std::lock_guard<std::mutex> lock(mu_);
    if (state_ != State::connected) return;
    if (!settled_) {
        state_ = State::proving;
        post_proof(news);
        return;
    }
    state_ = State::up;
    pump(news);
}

// Before the endpoint has settled the link goes on without it; later it cannot. What is posted ends here where the
// device lets go at once, and else by `close`, which follows.
void VerbsEndpoint::give_up(const std::string &reason, News &news) {
    {
        const std::lock_guard<std::mutex> lock(mu_);
        state_ = State::failed;
        for (const std::unique_ptr<Work> &work : works_) {
            if (work->failure == ADT_OK) work->failure = ADT_ERR_PEER_LOST;
        }
    }
    if (end_queue_pair(news)) retire_detached(news);
    news.stuck = false;
    if (settled_.exchange(true)) {
        lose(ADT_ERR_PEER_LOST, reason, news);
        return;
    }
    news.settled = Outcome{ADT_ERR_UNSUPPORTED, reason};
    news.messages.push_back(message(VerbsSay::failed, generation_));
}

void VerbsEndpoint::lose(adt_status_t status, const std::string &reason, News &news) {
    news.lost = Outcome{status, reason};
    news.error = reason;
}

void VerbsEndpoint::hear(const adt_message_t &told, News &news) {
    const std::lock_guard<std::mutex> control(control_);
    if (closed()) return;
    const auto state = [this] {
        const std::lock_guard<std::mutex> lock(mu_);
        return state_;
    };
    if (state() == State::failed || state() == State::starting) return;
    switch (static_cast<VerbsSay>(told.kind)) {
        case VerbsSay::offer:
            if (told.number < generation_) return;
            if (told.number - generation_ > kMostSkipped) break;
            if (told.number > generation_) {
                if (!end_queue_pair(news)) return;
                begin_generation(told.number, news);
            }
            if (state() != State::offered) return;
            retire_detached(news);
            if (!connect_queue_pair(told, news)) return;
            {
                const std::lock_guard<std::mutex> lock(mu_);
                state_ = State::connected;
            }
            news.messages.push_back(message(VerbsSay::ready, generation_));
            if (peer_ready_ == generation_) go_up(news);
            return;
        case VerbsSay::ready:
            peer_ready_ = std::max(peer_ready_, told.number);
            if (peer_ready_ == generation_) go_up(news);
            return;
        case VerbsSay::refused: {
            const std::lock_guard<std::mutex> lock(mu_);
            min_epoch_ = std::max(min_epoch_, static_cast<uint32_t>(told.a));
            if (const auto found = imported_.find(told.b); found != imported_.end()) found->second.refused = true;
            // Also what waits for a queue pair that this side has made anew by itself.
            end_works([this](const adt_batch_t &batch) { return refusal(batch) != ADT_OK; }, ADT_ERR_FENCED, news);
            return;
        }
        case VerbsSay::failed:
            if (!settled_) give_up("the peer could not make its side of the connection", news);
            return;
    }
    lose(ADT_ERR_PROTOCOL, "the peer's endpoint broke the rules", news);
}

void VerbsEndpoint::close(News &news) {
    const std::lock_guard<std::mutex> control(control_);
    closed_.store(true, std::memory_order_release);
    if (!end_queue_pair(news)) return;
    ibv_cq *cq = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mu_);
        state_ = State::failed;
        for (const std::unique_ptr<Work> &work : works_) enter(*work, ADT_ERR_PEER_LOST, 0, news);
        works_.clear();
        cq = std::exchange(cq_, nullptr);
    }
    retire_detached(news);
    // Waits until events that were read are acknowledged, which their reader does at once.
    if (cq != nullptr) device_->device.lib.destroy_cq(cq);
}

// The key of a cache was imported, or given back: only then can batches name it.
void VerbsEndpoint::imported(uint64_t cache) {
    const std::lock_guard<std::mutex> lock(mu_);
    ++imported_[cache].keys;
}
void VerbsEndpoint::released(uint64_t cache) {
    const std::lock_guard<std::mutex> lock(mu_);
    const auto found = imported_.find(cache);
    if (found != imported_.end() && --found->second.keys == 0) imported_.erase(found);
}

// Keeps the peer from local memory from here on.
void VerbsEndpoint::revoke(uint64_t cache, uint32_t epoch, News &news) {
    const std::lock_guard<std::mutex> control(control_);
    {
        const std::lock_guard<std::mutex> lock(mu_);
        if (closed() || state_ == State::failed || state_ == State::starting) return;
        rebuild_due_ = true;
    }
    if (!end_queue_pair(news)) return;
    adt_message_t told = message(VerbsSay::refused, generation_);
    told.a = epoch;
    told.b = cache;
    // By the thread that offers, or an offer could overtake it.
    refusals_.push_back(told);
    news.broken = true;
}

// ------------------------------------------------------------------------------------------------------------ posting

adt_status_t VerbsEndpoint::refusal(const adt_batch_t &batch) const {
    const auto &remote = *reinterpret_cast<const VerbsRemote *>(batch.remote);
    const auto found = imported_.find(remote.cache);
    return batch.epoch < min_epoch_ || (found != imported_.end() && found->second.refused) ? ADT_ERR_FENCED : ADT_OK;
}

adt_status_t VerbsEndpoint::post(adt_batch_t *batch, News &news) {
    const auto &remote = *reinterpret_cast<const VerbsRemote *>(batch->remote);
    const auto *const memory = reinterpret_cast<const VerbsMemory *>(batch->local_mem);
    const uint32_t needed = batch->opcode == ADT_READ ? ADT_REMOTE_READ : ADT_REMOTE_WRITE;
    if ((remote.access & needed) == 0) return ADT_ERR_PERMISSION;
    if (memory == nullptr) return ADT_ERR_UNSUPPORTED;
    // The engine has checked these bounds; a mistake there must not end the queue pair for all others.
    for (uint32_t i = 0; i < batch->count; ++i) {
        const adt_chunk_t &c = batch->chunks[i];
        if (c.remote_tensor >= remote.tensors.size() || c.length > remote.extent ||
            c.remote_offset > remote.extent - c.length) {
            return ADT_ERR_BOUNDS;
        }
        for (const char *at = static_cast<const char *>(c.local); at < static_cast<const char *>(c.local) + c.length;) {
            const Registration *const piece = memory->find(at);
            if (piece == nullptr) return ADT_ERR_BOUNDS;
            at = piece->base() + piece->bytes();
        }
    }
    const std::lock_guard<std::mutex> lock(mu_);
    if (closed()) return ADT_ERR_PEER_LOST;
    if (state_ == State::failed) return ADT_ERR_UNSUPPORTED;
    if (const adt_status_t status = refusal(*batch); status != ADT_OK) return status;
    works_.push_back(std::make_unique<Work>(Work{batch}));
    pump(news);
    return ADT_OK;
}

// Posts what waits, as far as the queue has room.
void VerbsEndpoint::pump(News &news) {
    while (state_ == State::up && next_ < works_.size() && credits_ > 0) {
        Work &work = *works_[next_];
        if (!post_some(work, news)) return;
        if (work.ended) ++next_;
    }
}

// Posts the next requests of a batch: each has one run of the peer's memory and as many pieces of local memory as
// there are neighbours over there. Only the last is signalled.
bool VerbsEndpoint::post_some(Work &work, News &news) {
    const adt_batch_t &batch = *work.batch;
    const auto &memory = *reinterpret_cast<const VerbsMemory *>(batch.local_mem);
    const auto &remote = *reinterpret_cast<const VerbsRemote *>(batch.remote);
    const bool reading = batch.opcode == ADT_READ;
    const uint64_t group = next_group_++;
    requests_.clear();
    pieces_.clear();
    pieces_.reserve(kPiecesAtOnce + 1);  // requests point into it
    uint64_t bytes = 0;                  // of the last request
    const auto start = [&](ibv_wr_opcode opcode, uint64_t address, uint32_t rkey) {
        ibv_send_wr request{};
        request.wr_id = group;
        request.sg_list = pieces_.data() + pieces_.size();
        request.opcode = opcode;
        request.wr.rdma.remote_addr = address;
        request.wr.rdma.rkey = rkey;
        requests_.push_back(request);
        bytes = 0;
    };
    const auto add = [&](const char *local, uint64_t length, uint32_t lkey) {
        pieces_.push_back(
            {static_cast<uint64_t>(reinterpret_cast<uintptr_t>(local)), static_cast<uint32_t>(length), lkey});
        ++requests_.back().num_sge;
        bytes += length;
    };
    while (work.chunk < batch.count && pieces_.size() < kPiecesAtOnce) {
        const adt_chunk_t &chunk = batch.chunks[work.chunk];
        const char *const local = static_cast<const char *>(chunk.local) + work.at;
        const uint64_t address = remote.tensors[chunk.remote_tensor] + chunk.remote_offset + work.at;
        const Registration &here = *memory.find(local);
        const VerbsRemote::Piece &there = *remote.find(address);
        uint64_t length = std::min<uint64_t>(
            chunk.length - work.at,
            std::min(static_cast<uint64_t>(here.base() + here.bytes() - local), there.base + there.bytes - address));
        ibv_send_wr *const last = requests_.empty() ? nullptr : &requests_.back();
        const bool goes_on = last != nullptr && last->wr.rdma.rkey == there.rkey &&
                             last->wr.rdma.remote_addr + bytes == address && bytes < max_message_;
        if (goes_on) length = std::min(length, max_message_ - bytes);
        if (goes_on && pieces_.back().lkey == here.mr().lkey &&
            pieces_.back().addr + pieces_.back().length == static_cast<uint64_t>(reinterpret_cast<uintptr_t>(local))) {
            pieces_.back().length += static_cast<uint32_t>(length);
            bytes += length;
        } else if (goes_on && static_cast<uint32_t>(last->num_sge) < max_sge_) {
            add(local, length, here.mr().lkey);
        } else {
            if (requests_.size() == credits_) break;
            length = std::min(length, max_message_);
            start(reading ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, address, there.rkey);
            add(local, length, here.mr().lkey);
        }
        work.at += length;
        if (work.at == chunk.length) {
            work.at = 0;
            ++work.chunk;
        }
    }
    bool ended = work.chunk == batch.count;
    // A write is acknowledged when the peer's device has it. A read behind it is answered when it is in memory.
    if (ended && !reading && (remote.access & ADT_REMOTE_READ) != 0) {
        ended = requests_.size() < credits_;
        if (ended) {
            const adt_chunk_t &chunk = batch.chunks[batch.count - 1];
            const uint64_t address = remote.tensors[chunk.remote_tensor] + chunk.remote_offset + chunk.length - 1;
            start(IBV_WR_RDMA_READ, address, remote.find(address)->rkey);
            add(device_->device.scratch, 1, device_->device.scratch_mr->lkey);
        }
    }
    work.ended = ended;
    const auto count = static_cast<uint32_t>(requests_.size());
    for (uint32_t i = 0; i + 1 < count; ++i) requests_[i].next = &requests_[i + 1];
    requests_.back().send_flags = IBV_SEND_SIGNALED;
    ++work.groups;
    credits_ -= count;
    groups_.push_back({group, &work, count, ended});
    ibv_send_wr *bad = nullptr;
    const int code = ibv_post_send(qp_, requests_.data(), &bad);
    if (code == 0) return true;
    work.failure = ADT_ERR_IO;
    news.error = "ibv_post_send: " + errno_text(code);
    mark_broken(news);
    return false;
}

// A write of no byte, which needs no key: the peer's device answers it, or nothing arrives there.
bool VerbsEndpoint::post_proof(News &news) {
    ibv_send_wr request{};
    request.wr_id = next_group_++;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    --credits_;
    groups_.push_back({request.wr_id, nullptr, 1, true});
    ibv_send_wr *bad = nullptr;
    if (ibv_post_send(qp_, &request, &bad) == 0) return true;
    proof_status_ = ADT_ERR_IO;
    mark_broken(news);
    return false;
}

void VerbsEndpoint::mark_broken(News &news) {
    if (state_ == State::failed) return;
    state_ = State::down;
    if (std::exchange(rebuild_due_, true)) return;
    news.broken = true;
}

// -------------------------------------------------------------------------------------------------------- completions

void VerbsEndpoint::progress(News &news) {
    take_completions(news);
    const std::lock_guard<std::mutex> lock(mu_);
    pump(news);
}

bool VerbsEndpoint::arm(News &news) {
    {
        const std::lock_guard<std::mutex> lock(mu_);
        if (cq_ == nullptr) return true;
        ibv_req_notify_cq(cq_, 0);
    }
    take_completions(news);
    const std::lock_guard<std::mutex> lock(mu_);
    pump(news);
    return !news.done && !news.settled;
}

void VerbsEndpoint::take_completions(News &news) {
    constexpr int kAtOnce = 16;
    ibv_wc done[kAtOnce];
    const std::lock_guard<std::mutex> lock(mu_);
    for (;;) {
        const int count = cq_ == nullptr ? 0 : ibv_poll_cq(cq_, kAtOnce, done);
        if (count <= 0) return;
        for (int i = 0; i < count; ++i) take(done[i], news);
    }
}

void VerbsEndpoint::take(const ibv_wc &wc, News &news) {
    // Numbers never come again, so what an earlier queue pair has left behind is not found.
    const auto named = std::find_if(groups_.begin(), groups_.end(), [&](const Group &g) { return g.id == wc.wr_id; });
    if (named == groups_.end()) return;
    if (wc.status != IBV_WC_SUCCESS) {
        // The others' requests come back flushed; the first to fail says why.
        if (wc.status != IBV_WC_WR_FLUSH_ERR) {
            const adt_status_t status = ADT_ERR_WORK - static_cast<adt_status_t>(wc.status);
            if (named->work == nullptr) {
                proof_status_ = status;
            } else if (named->work->failure == ADT_OK) {
                named->work->failure = status;
            }
        }
        mark_broken(news);
        return;
    }
    for (;;) {
        const Group group = groups_.front();
        groups_.pop_front();
        credits_ += group.requests;
        if (group.work == nullptr) {
            if (state_ == State::proving) state_ = State::up;
            if (!settled_.exchange(true)) news.settled = Outcome{ADT_OK, ""};
        } else {
            --group.work->groups;
            if (group.last && group.work->failure == ADT_OK) finish(*group.work, ADT_OK, news);
        }
        if (group.id == wc.wr_id) return;
    }
}

// Takes a batch of which nothing is posted any more out of the list.
void VerbsEndpoint::finish(Work &work, adt_status_t status, News &news) {
    const auto at = std::find_if(works_.begin(), works_.end(), [&](const auto &entry) { return entry.get() == &work; });
    if (static_cast<size_t>(at - works_.begin()) < next_) --next_;
    enter(work, status, 0, news);
    works_.erase(at);
}

// Under `mu_`. Takes batches off local memory; where something of one is posted, by a new queue pair.
template <typename Which>
void VerbsEndpoint::end_works(const Which &which, adt_status_t status, News &news) {
    for (size_t i = 0; i < works_.size();) {
        Work &work = *works_[i];
        if (!which(*work.batch)) {
            ++i;
            continue;
        }
        work.given_up = status;
        if (work.groups > 0) {
            mark_broken(news);
            ++i;
            continue;
        }
        if (!work.stale) {
            finish(work, status, news);
            continue;
        }
        enter(work, status, 1, news);
        detached_.push_back(std::move(works_[i]));
        if (i < next_) --next_;
        works_.erase(works_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

void VerbsEndpoint::cancel(uint64_t op, News &news) {
    const std::lock_guard<std::mutex> lock(mu_);
    end_works([op](const adt_batch_t &batch) { return batch.op_id == op; }, ADT_ERR_ABORTED, news);
}

}  // namespace adt
#endif
